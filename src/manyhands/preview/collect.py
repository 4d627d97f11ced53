"""Collects what a preview shows: rows, the plan's batch, counts, faults; of images sizes for the terminal, thumbnails
for the page. Writes nothing that outlives it but the token cache.
"""

from __future__ import annotations

import base64
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.config.schema import MOST_PIXELS, RunConfig
from manyhands.core.errors import UserError
from manyhands.data.images.files import BadImage, PixelBounds, decode, read_bytes
from manyhands.data.read.sources import ResolvedSource, resolve_sources
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import TOKENS, Sample, StoredImage, from_streams, split_documents, weights_of
from manyhands.data.tokenize.cache import UNFINISHED
from manyhands.data.tokenize.prepare import prepare
from manyhands.data.tokenize.summary import PreparedData
from manyhands.data.tokenize.tokenizer import open_tokenizer
from manyhands.facts.hub import locate_model
from manyhands.planner.efficiency import lay_out_step
from manyhands.planner.text import sentence_of
from manyhands.planner.types import Plan
from manyhands.preview.contents import (
    Preview,
    ShownBatch,
    ShownImage,
    ShownSample,
    SourceCounts,
    Span,
    bin_lengths,
    decode_spans,
    describe_lengths,
)
from manyhands.preview.usable import Usable, prepare_usable

SHOWN_ELSEWHERE = ("source ", "left out by ")  # notes that the preview has in other words
PROGRESS = ("token", "the token cache")  # what preparing says beside the notes that the preview has

Report = Callable[[str], Any]
RUN = re.compile(r"(<[^<>\s]{1,40}>)\1{3,}")
BETWEEN_DOCUMENTS = "\n\n--- or, to the same prompt ---\n\n"  # of a pair
THUMBNAIL = 160  # pixels of the longer side


def collect(config: RunConfig, *, step: int = 1, max_samples: int | None = 3, report: Report = print) -> Preview:
    """The preview of a run. ``step`` counts from 1; at most ``max_samples`` rows of its first micro-batch are decoded,
    None takes all.

    Faults of the data are a part of it. Raises UserError for anything else: a model that is not there, a step beyond
    the end.
    """
    model = config.model
    folder = locate_model(model.name, model.revision, False, trust_remote_code=model.trust_remote_code, report=report)
    tokenizer = open_tokenizer(folder, model)
    try:
        facts = prepare(config, folder, lambda line: report(line) if line.startswith(PROGRESS) else None)
    except UserError as error:
        if config.data.max_length < 2:  # no row has a target: nothing could be shown
            raise
        with _temporary_folder(config, error) as made:
            usable = prepare_usable(config, folder, tokenizer, made, report)
            if not usable.refused:
                raise  # a cache that cannot be written, ...
            return _collect(config, folder, tokenizer, usable, step, max_samples, report)
    usable = Usable(facts, TokenStore.open(facts.folder), resolve_sources(config.data), ())
    return _collect(config, folder, tokenizer, usable, step, max_samples, report)


@contextmanager
def _temporary_folder(config: RunConfig, error: UserError) -> Iterator[Path]:
    """A folder beside the token cache, which goes afterwards; ``error`` is raised where none can be made."""
    cache = Path(config.data.cache).expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}preview-", dir=cache))
    except OSError:
        raise error from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _collect(
    config: RunConfig,
    folder: Path,
    tokenizer: Any,
    usable: Usable,
    step: int,
    max_samples: int | None,
    report: Report,
) -> Preview:
    facts, store = usable.facts, usable.store
    if facts is None or store is None:
        return Preview(config.name, config.model.name, config.data.max_length, refused=usable.refused)
    planned = make_plan(config, folder, facts, report)
    train = store.train
    batch, efficiency = None, ""
    rows = np.arange(train.num_samples, dtype=np.int64)
    if isinstance(planned, Plan):
        batch, rows = _lay_out(planned, store, config.seed, step)
        efficiency = next((sentence_of(reason) for reason in planned.why if reason.code == "efficiency"), "")
    shown = rows[:max_samples]
    return Preview(
        config.name,
        config.model.name,
        config.data.max_length,
        rows=tuple(_decode(tokenizer, store, usable.sources, int(row)) for row in shown),
        num_more_rows=len(rows) - len(shown),
        batch=batch,
        plan_error=planned if isinstance(planned, UserError) else None,
        sources=_count_sources(store),
        lengths=bin_lengths(train.lengths),
        length_words=describe_lengths(train.lengths),
        efficiency=efficiency,
        facts=facts,
        notes=tuple(
            note.removeprefix("note: ") for note in store.meta["notes"] if not note.startswith(SHOWN_ELSEWHERE)
        ),
        refused=usable.refused,
    )


def make_plan(config: RunConfig, folder: Path, facts: PreparedData, report: Report) -> Plan | UserError:
    """What `manyhands plan` makes of these rows here, or why it cannot. Downloads no weights."""
    from manyhands.launch.run.prepare import gather_facts
    from manyhands.planner.search import plan

    model = config.model.model_copy(update={"name": str(folder), "revision": None})
    try:
        return plan(
            config,
            gather_facts(
                config.model_copy(update={"model": model}), data=facts, saves=False, identify=False, report=report
            ),
        )
    except UserError as error:
        return error


def _lay_out(plan: Plan, store: TokenStore, seed: int, step: int) -> tuple[ShownBatch, np.ndarray]:
    """The first micro-batch of the first rank in a step, and its rows."""
    if step > plan.num_steps:
        raise UserError(
            f"there is no step {step:,}",
            where="--step",
            why=f"the run has {plan.num_steps:,} steps",
            fix="choose one of them",
        )
    if plan.shares_prompts:
        store = store.share_prompts()
    order = store.order_samples(seed, **plan.step_size)
    of_step = order.samples(*order.locate(step - 1))
    layout = lay_out_step(plan, of_step, store.train.lengths, store.train.image_units)
    rows = layout.of_rank(0)[0]
    packed = plan.layout.micro_tokens is not None
    capacity = (plan.layout.pack_tokens or plan.layout.micro_tokens) if packed else plan.layout.micro_samples
    assert capacity is not None
    num_tokens = int(store.train.lengths[rows].sum())
    return (
        ShownBatch(
            step,
            plan.num_steps,
            len(of_step),
            plan.layout.world_size,
            layout.num_micro_batches,
            len(rows),
            num_tokens,
            capacity,
            packed,
        ),
        rows,
    )


def _decode(tokenizer: Any, store: TokenStore, sources: Sequence[ResolvedSource], row: int) -> ShownSample:
    train = store.train
    sample = train.sample(row)
    spans: list[Span] = []
    for document in split_documents(sample, train.streams):
        weights = weights_of(document)
        weights[0] = 0  # nothing comes before the first token, so it is never a target
        spans += [Span(BETWEEN_DOCUMENTS, 0)] if spans else []
        spans += map(shorten, decode_spans(tokenizer, document[TOKENS.name], weights))
    source = sources[int(train.sources[row])]
    file, here = source.files[store.file_number(row)], Path.cwd()
    file = file.relative_to(here) if file.is_relative_to(here) else file
    return ShownSample(
        row,
        source.name,
        f"{file}:{store.line(row)}",
        len(sample[TOKENS.name]),
        int(train.num_loss_tokens[row]),
        tuple(spans),
        show_images(sample),
    )


def _count_sources(store: TokenStore) -> tuple[SourceCounts, ...]:
    described = store.meta["sources"]
    labels = np.bincount(store.train.sources, weights=store.train.num_loss_tokens, minlength=len(described))
    all_tokens = sum(source["weight"] * source["num_tokens"] for source in described)
    return tuple(
        SourceCounts(
            source["name"],
            source["path"],
            source["format"],
            source["num_samples"],
            source["num_tokens"],
            int(labels[index]),
            source["num_validation_samples"],
            source["weight"],
            source["weight"] * source["num_tokens"] / all_tokens,
        )
        for index, source in enumerate(described)
    )


def show_images(sample: Sample) -> tuple[ShownImage, ...]:
    """The images of a sample in the order of their tokens; () where it has none."""
    return tuple(
        ShownImage(
            image.place or "of the row",
            image.size[1],
            image.size[0],
            image.num_tokens,
            _draw_thumbnail(image),
        )
        for image in from_streams(sample)
    )


def shorten(span: Span) -> Span:
    """The span with runs of one marker, such as an image's placeholders, as one and their number."""
    return replace(span, text=RUN.sub(lambda found: f"{found[1]} × {len(found[0]) // len(found[1])}", span.text))


def _draw_thumbnail(image: StoredImage) -> str:
    """A data URL; "" where the image cannot be read. What is shown was made of pixels: nothing foreign is copied."""
    from PIL import Image

    try:
        raw = read_bytes(image.place) if image.place else image.source
        picture = Image.fromarray(decode(raw, "", PixelBounds(MOST_PIXELS)))
    except BadImage:
        return ""
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    picture.save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
