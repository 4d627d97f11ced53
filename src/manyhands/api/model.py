"""``manyhands.load``: a trained model that answers. Weights are read, and torch is imported, at the first answer."""

from __future__ import annotations

import json
import operator
import os
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from manyhands.api.arguments import load_given
from manyhands.api.outputs import Outputs, export
from manyhands.api.process import run_module
from manyhands.api.runs import plan
from manyhands.api.sources import write_rows
from manyhands.config.text import names
from manyhands.core.errors import UserError
from manyhands.data.read.messages import RowRefused

# What transformers' model in memory has, and is had from there.
OF_MODEL = names(
    "parameters named_parameters buffers modules named_modules state_dict dtype generation_config get_input_embeddings "
    "get_output_embeddings num_parameters get_memory_footprint"
)
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load(
    folder: str | os.PathLike[str], *, base: str | None = None, device_map: str | Mapping[str, Any] | None = "auto"
) -> LanguageModel:
    """The model of a run's folder, a model folder or an adapter folder.

    ``base``: the base model of an adapter, by default the one it names. ``device_map``: where its layers are. ``auto``
    is as few GPUs as hold it; None is one GPU always. Raises ``UserError``.
    """
    from manyhands.infer.load import find_parts

    find_parts(Path(folder), base)  # fail here rather than at the first call
    return LanguageModel(Path(folder), base=base, device_map=check_device_map(device_map))


def check_device_map(device_map: Any) -> str | dict[str, Any] | None:
    """UserError for what is no device map."""
    if isinstance(device_map, Mapping):
        return dict(device_map)
    if device_map is None or device_map in DEVICE_MAPS:
        return device_map
    raise UserError(
        f"device_map is {device_map!r}",
        fix=f"give one of {', '.join(DEVICE_MAPS)}, or a device for each module: {{'model.layers.0': 0, ...}}",
    )


class LanguageModel(Outputs):
    """A model that answers. Nothing of it is in memory before the first answer."""

    def __init__(
        self,
        folder: Path,
        *,
        base: str | None = None,
        device_map: str | dict[str, Any] | None = "auto",
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """``folder``: or a hub name. ``given``: settings of the run by their names in ``FastLanguageModel``."""
        self.folder, self.base, self.device_map = folder, base, device_map
        self.given = dict(given or {"model_name": str(folder)})
        self.outputs: dict[str, Path] | None = None  # by kind, of the run that trained it

    def __repr__(self) -> str:
        return f"LanguageModel({str(self.folder)!r})"

    def trained(self, folder: Path, outputs: dict[str, Path]) -> None:
        """Become what the run in ``folder`` has saved, also for the next trainer."""
        self.release()
        self.folder, self.base, self.outputs = folder, None, outputs
        if "adapter" in outputs:
            self.given |= {"adapter": str(outputs["adapter"].resolve()), "init_lora_weights": True}
        elif "model" in outputs:
            self.given["model_name"] = str(outputs["model"].resolve())

    def release(self) -> None:
        """Frees the memory of its weights; the next answer reads them again."""
        if vars(self).pop("answerer", None) is not None:
            import torch

            torch.cuda.empty_cache()

    @cached_property
    def config(self) -> Any:
        """transformers' configuration of the model. Setting it changes no run."""
        from transformers import AutoConfig

        from manyhands.facts.hub import locate_model
        from manyhands.infer.load import find_parts

        if self.outputs is not None or self.folder.is_dir():
            folder = find_parts(self.folder, self.base).weights
        else:
            folder = locate_model(str(self.folder), self.given.get("revision"), False)
        return AutoConfig.from_pretrained(folder, trust_remote_code=bool(self.given.get("trust_remote_code")))

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(trained parameters, all parameters), adapters included: of the run, or of a plan for the model."""
        from manyhands.launch.run.folder import RunFolder

        if (self.folder / "run.json").is_file():
            made = RunFolder(self.folder).read_plan()
        else:
            with tempfile.TemporaryDirectory() as cache:
                rows = write_rows([{"text": "a"}, {"text": "b"}], Path(cache), "train")
                made = plan(load_given({**self.given, "train_dataset": rows}, {"data.cache": cache}).config)
        return made.num_trained, made.num_parameters

    def print_trainable_parameters(self) -> None:
        """Prints ``get_nb_trainable_parameters`` as PEFT does."""
        trained, every = self.get_nb_trainable_parameters()
        print(f"trainable params: {trained:,} || all params: {every:,} || trainable%: {100 * trained / every:.4f}")

    def merge_and_unload(self) -> LanguageModel:
        """The model with its adapter merged, from ``merged`` in the run's folder; written and verified if missing."""
        run = self._run()
        if (run / "adapter").is_dir():
            export(run, run / "merged", "--merge")
        found = load(run / ("merged" if (run / "adapter").is_dir() else "model"))
        found.outputs = {"model": found.folder}
        return found

    def eval(self) -> LanguageModel:
        """The same: it is in evaluation mode."""
        return self

    def train(self, mode: bool = True) -> LanguageModel:
        """The same: the run sets the mode of its own copy."""
        return self

    @property
    def device(self) -> Any:
        """Of the weights that answer."""
        import torch

        if "answerer" in vars(self):
            return self.answerer.model.device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def to(self, device: Any) -> LanguageModel:
        """The same where it answers on such a device, else UserError."""
        import torch

        if isinstance(device, (str, int, torch.device)) and torch.device(device).type == self.device.type:
            return self
        raise UserError(
            f"the model answers on {self.device}, not on {device}",
            where="to",
            fix="place it where it is made: device_map={'': 'cpu'} in from_pretrained or manyhands.load",
        )

    def __call__(self, **inputs: Any) -> Any:
        """transformers' own forward pass."""
        return self.answerer.model(**inputs)

    def __getattr__(self, name: str) -> Any:
        """``parameters`` and the like of the weights that answer, which are read for it."""
        if name not in OF_MODEL:
            way = "" if name.startswith("_") else "; transformers' own model in memory is model.answerer.model"
            raise AttributeError(f"LanguageModel has no {name!r}{way}")
        if self.outputs is None and "r" in self.given:
            raise UserError(
                "the model's adapter is made by the run",
                where=f"model.{name}",
                why="before it is trained there are only the base model's weights",
                fix="model.print_trainable_parameters() counts what a run trains; call this one after train()",
            )
        return getattr(self.answerer.model, name)

    def generate(self, prompts: Any = None, *, max_new_tokens: int = 256, on_text: Any = None, **options: Any) -> Any:
        """The answer to each prompt, in order: a question, or a conversation as a list of messages with role and
        content. A single question gets a single answer. Prompts share batches as memory allows.

        ``options``: temperature (0: greedy), top_p, top_k, repetition_penalty, seed, stop. ``on_text(number, text)``
        gets each new piece of an answer. ``input_ids`` and other tensors go to transformers' own ``generate``, which
        returns ids. On all GPUs at once: ``generate_file``.
        """
        if "input_ids" in options:
            return self.answerer.model.generate(max_new_tokens=max_new_tokens, **options)
        if not isinstance(prompts, (str, list, tuple)):
            raise UserError(
                f"prompts are a {type(prompts).__name__}", fix='give a list, such as ["Why is the sky blue?"]'
            )
        asked = [prompts] if isinstance(prompts, str) else prompts
        settings = _read_settings(max_new_tokens, options)
        try:
            conversations = [self._read_prompt(number, one) for number, one in enumerate(asked)]
            answers = [found.text for found in self.answerer.answer_all(conversations, settings, on_text=on_text)]
        except RowRefused as refused:
            raise UserError(str(refused), where="generate") from None
        return answers[0] if isinstance(prompts, str) else answers

    def _read_prompt(self, number: int, prompt: Any) -> list[dict[str, Any]]:
        """A question or a conversation as messages. Raises UserError and RowRefused."""
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if not isinstance(prompt, (list, tuple)):
            raise UserError(
                f"prompt {number} is a {type(prompt).__name__}",
                where="generate",
                fix="give texts or conversations; a single conversation is a list in a list: [[{'role': ...}]]",
            )
        from manyhands.infer.prompts import read_messages

        return read_messages(list(prompt), f"prompt {number}", images=self.answerer.images is not None)

    def generate_file(
        self,
        input: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        gpus: int | None = None,
        processes: int = 1,
        overwrite: bool = False,
        max_new_tokens: int = 256,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Answers each row of a JSONL file on all GPUs (``gpus`` of them), or on so many ``processes`` of a CPU, as
        ``manyhands generate --input --output``; returns the rows with their answers. Started again it continues.

        Among ranks that a launcher has started, rank 0 has it done and all return the rows.
        """
        from manyhands.api.start import on_first_rank

        settings = _read_settings(max_new_tokens, options)
        asked = {
            "folder": str(self._find()),
            "input": os.fspath(input),
            "output": os.fspath(output),
            "base": self.base,
            "settings": settings.to_json(),
            "placement": {"gpus": gpus, "processes": processes, "device_map": _placement_of(self.device_map)},
            "overwrite": overwrite,
        }
        on_first_rank(lambda: _run_infer(asked))
        with open(output, encoding="utf-8") as file:  # by line ends alone: an answer may hold U+2028
            return [json.loads(line) for line in file]

    @cached_property
    def answerer(self) -> Any:
        """``infer.load.Answerer``: the model in memory, its tokenizer and what ends an answer."""
        import torch

        from manyhands.infer.batch import open_placed
        from manyhands.infer.load import find_parts, load_answerer, open_answerer
        from manyhands.infer.replicas import Placement
        from manyhands.launch.environment import detect_launcher

        launcher = detect_launcher()
        if isinstance(self.device_map, dict):
            return open_answerer(self._find(), self.base, self.device_map)
        if launcher.world_size > 1 and torch.cuda.is_available():  # the GPU of this rank, as the others have theirs
            return load_answerer(find_parts(self._find(), self.base), device=f"cuda:{launcher.local_rank}")
        device_map = _placement_of(self.device_map) if torch.cuda.device_count() > 1 else "auto"
        return open_placed(self._find(), self.base, Placement(device_map=device_map))

    def _find(self) -> Path:
        """Its folder, fetched where it is a hub name."""
        from manyhands.facts.hub import locate_model

        if self.outputs is not None or self.folder.is_dir():
            return self.folder
        return locate_model(str(self.folder), self.given.get("revision"), True)

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, with the chat template that the run used."""
        return self.answerer.tokenizer


def _placement_of(device_map: str | dict[str, Any] | None) -> str:
    """By the names of ``infer.replicas``."""
    if isinstance(device_map, dict):
        raise UserError(
            "a device_map by modules is of one copy of the model",
            where="generate_file",
            fix="use generate, or device_map='balanced'",
        )
    return {None: "none", "balanced_low_0": "balanced"}.get(device_map, str(device_map))


def _read_settings(max_new_tokens: int, options: Mapping[str, Any]) -> Any:
    from dataclasses import fields

    from manyhands.config.text import nearest_name
    from manyhands.infer.settings import GenerationSettings

    known = [field.name for field in fields(GenerationSettings)]
    for name in options:
        if name not in known:
            near = nearest_name(name, known)
            raise UserError(
                f"there is no option {name!r}",
                where="generate",
                fix=f"did you mean {near}?" if near else f"options are {', '.join(known)}",
            )
    given = {"max_new_tokens": max_new_tokens, **options}
    try:
        given |= {name: operator.index(given[name]) for name in ("max_new_tokens", "top_k", "seed") if name in given}
        return GenerationSettings(**given)
    except TypeError as error:
        raise UserError("an option has a value of the wrong type", where="generate", why=str(error)) from None


def _run_infer(asked: Mapping[str, Any]) -> None:
    """In a process of its own, as the command does: copies of the model are processes too."""
    run_module("manyhands.infer", "generate", json.dumps(asked))
