"""The keys of a run file about its data and its batch: sources, ``data`` and ``batch``; and what all sections share.

Part of the schema (``schema.py``), under its rules: no torch, no file, no side effect; every key has a description.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
MOST_PIXELS = 178_956_970  # of an image: what Pillow decodes at most
PixelCount = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NumSamples = Annotated[int, Field(ge=1, strict=True)]  # strict: 1.0 would be a share
Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt", "question", "query", "preference", "rejected_response", "text",
    "tokens", "segments",
]  # fmt: skip
TooLong = Literal["error", "truncate", "split", "drop"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Section(BaseModel):
    """A frozen group of keys; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Source(Section):
    """Where rows come from: a file, a folder of files, or a dataset on the hub."""

    path: str = Field(
        description="A .jsonl, .json, .csv, .tsv, .parquet or .txt file (also .gz), a folder, or hub:OWNER/NAME.",
        min_length=1,
    )
    name: str | None = Field(None, description="The source's name in statistics; null is that of the file or dataset.")
    subset: str | None = Field(None, description="hub: configuration (subset) of the dataset.")
    split: str = Field(
        "train",
        description="Split of a hub dataset or saved folder, or rows in the given order, of files too: train[:20%], "
        "train[100:200], train[-50:], train+test. Of a hub dataset, train[:1000] fetches only those rows.",
    )
    revision: str | None = Field(None, description="hub: branch, tag or commit; null is the default branch.")
    files: tuple[str, ...] | None = Field(
        None, description="hub: read these files of the dataset (names or glob patterns), not those of its splits."
    )
    format: Format | None = Field(None, description="Format of the rows; null is data.format.")
    fields: dict[str, str] | None = Field(None, description="Column names by field; null is data.fields.")
    ignore: tuple[str, ...] | None = Field(None, description="Columns to ignore; null is data.ignore.")
    roles: dict[str, Role] = Field(
        {},
        description="Roles by the names that rows have for them where these are not known, such as {visitor: user, "
        "agent: assistant}.",
    )
    drop_system: bool = Field(False, description="Leave out the system prompts of conversations.")
    too_long: TooLong | None = Field(None, description="Samples over max_length; null is data.too_long.")
    weight: float = Field(
        1.0,
        gt=0,
        description="Passes over the source per epoch: 0.5 takes a different half in each epoch, 2 every sample twice.",
    )
    max_samples: PositiveInt | None = Field(None, description="Use at most this many samples, chosen by the seed.")


def default_cache(environ: Mapping[str, str]) -> str:
    """``data.cache``, as the XDG base directory specification has it: a relative path is not one."""
    folder = environ.get("XDG_CACHE_HOME", "")
    return f"{folder if folder.startswith('/') else '~/.cache'}/manyhands/data"


class DataSection(Section):
    """Training and validation data."""

    train: str | tuple[str | Source, ...] = Field(
        description="Training data: a path (see data.train.path), or a list of paths and sources with weights.",
        min_length=1,
    )
    validation: str | tuple[str | Source, ...] | None = Field(
        None, description="Validation data, as in `train`; without it a part of `train` is held out."
    )
    validation_fraction: Fraction | NumSamples = Field(
        0.02,
        description="Fraction of the training data held out if `validation` is not given: at least 20 samples, or a "
        "tenth if that is fewer; 0 holds out none. A whole number is the number of samples.",
    )
    format: Format = Field(
        "auto",
        description="Format of the rows: messages; sharegpt (conversations); alpaca (instruction, input, output); "
        "prompt + completion; question + answer; query + response; preference (chosen, rejected); rejected_response "
        "(beside messages); text; tokens (input_ids, labels); segments (text and label of each). "
        "auto looks at the first rows.",
    )
    fields: dict[str, str] = Field(
        {},
        description="Columns by field where names differ, such as {prompt: frage, completion: antwort}.",
    )
    ignore: tuple[str, ...] = Field(
        (),
        description="Columns to ignore, such as those that are refused otherwise (rejected, label, images).",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant", description="Loss tokens of a conversation: all assistant turns, the last one, or all tokens."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="Arguments of the chat template, such as {enable_thinking: false}; a row's own, in its column "
        "chat_template_kwargs, take precedence.",
    )
    date: str = Field(
        "2026-01-01",
        description="The date shown by chat templates that include today's date.",
        pattern=r"^\d{4}-\d{2}-\d{2}$",
    )
    max_samples: PositiveInt | None = Field(None, description="Use at most this many samples, chosen by the seed.")
    max_length: PositiveInt = Field(2048, description="Maximum length of a sample in tokens.")
    too_long: TooLong = Field(
        "error",
        description="Samples over max_length: error, truncate at the end, split texts into several (task cpt or "
        "mixed), or drop (they are counted).",
    )
    min_length: PositiveInt = Field(1, description="Samples with fewer tokens are dropped and counted.")
    deduplicate: bool = Field(
        False,
        description="Of samples with the same token ids keep the first, in training data, in validation data and in "
        "each set of `evaluate.data`.",
    )
    order: Literal["shuffled", "as_given"] = Field(
        "shuffled",
        description="Order of the samples: shuffled by the seed, differently in each epoch, or as given in each, "
        "one source after another.",
    )
    packing: bool | Auto = Field(
        "auto",
        description="Pack samples into one sequence, without attention between them; auto: if the model allows.",
    )
    images: bool | Auto = Field(
        "auto",
        description="Train rows with images: auto if one of the first 100 rows of a source has one and the model takes "
        "them; false refuses rows with images.",
    )
    image_folder: str | None = Field(
        None,
        description="Folder of images that rows name by relative paths, or a .zip file with them, also of the hub "
        "(hub:OWNER/NAME/images.zip), which is unpacked into data.cache; null is the folder of the data file.",
    )
    image_urls: bool | tuple[str, ...] = Field(
        False,
        description="Fetch images that rows name by http(s) addresses: true from public hosts, a list of host names "
        "from these alone, which may be of an inner network.",
    )
    bad_images: Literal["refuse", "skip"] = Field(
        "refuse",
        description="Rows with an image that is missing, damaged or too large: refuse them all, or skip these rows "
        "(they are counted).",
    )
    max_image_pixels: PixelCount = Field(89_478_485, description="An image with more pixels is bad; it is not decoded.")
    shrink_images_above: PixelCount | None = Field(
        None,
        description="Images with more pixels are made smaller, to this many in proportion, before the model's "
        "processor resizes and cuts them; null: none.",
    )
    enlarge_images_below: PixelCount | None = Field(
        None, description="Images with fewer pixels are made larger, likewise; null: none."
    )
    image_cache_gb: NonNegativeFloat = Field(
        4.0, description="Prepared images that are kept in `cache`, in GB on disk, for later epochs and runs; 0: none."
    )
    image_memory_gb: NonNegativeFloat = Field(
        0.25, description="Prepared images that each process keeps in memory, in GB; 0: none."
    )
    cache_features: bool | Auto = Field(
        "auto",
        description="Compute what a frozen vision tower makes of each image once, and keep that in `cache`: auto where "
        "images are trained more than once, it fits into `feature_cache_gb` and reading it is faster; false computes "
        "it in every epoch.",
    )
    feature_cache_gb: NonNegativeFloat = Field(
        50.0,
        description="Features of images that are kept in `cache`, in GB on disk, of all runs together; those that were "
        "not used for the longest time go first.",
    )
    workers: NonNegativeInt | Auto = Field(
        "auto",
        description="Data loader processes per rank; 0 is one thread, auto takes as many as the batches need.",
    )
    cache: str = Field(
        default_cache(os.environ),
        description="Folder of tokenized data, shared between runs; by default in $XDG_CACHE_HOME where that is set.",
    )


class BatchSection(Section):
    """The size of a step. The global batch is the same on any number of GPUs."""

    samples: PositiveInt | Auto = Field(
        "auto", description="Samples in the global batch, over all GPUs and accumulation."
    )
    loss_tokens: PositiveInt | None = Field(
        None,
        description="Instead of samples: loss tokens in the global batch, which ends with the sample that reaches it.",
    )
    packs: PositiveInt | None = Field(
        None,
        description="Instead of samples: packs of data.max_length tokens in the global batch, over all GPUs; a step "
        "trains the samples that they hold.",
    )
    micro_samples: PositiveInt | Auto = Field("auto", description="Without packing: samples per GPU and micro-batch.")
    micro_tokens: PositiveInt | Auto = Field(
        "auto", description="With packing: tokens per GPU and micro-batch, >= data.max_length."
    )
    accumulation: PositiveInt | Auto = Field("auto", description="Without packing: micro-batches per GPU and step.")
