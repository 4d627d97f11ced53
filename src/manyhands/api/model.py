"""``manyhands.load``: a trained model that answers. Weights are read, and torch is imported, at the first answer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import UserError

if TYPE_CHECKING:
    from manyhands.api.runs import TrainedRun

Conversation = Sequence[Mapping[str, str]]
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load(
    folder: str | os.PathLike[str], *, base: str | None = None, device_map: str | Mapping[str, Any] | None = "auto"
) -> LanguageModel:
    """The model of a run's folder, a model folder or an adapter folder.

    ``base``: the base model of an adapter, by default the one it names. ``device_map``: where its layers are. ``auto``
    is the one GPU, or all of them where there are several; None is one GPU always. Raises ``UserError``.
    """
    from manyhands.infer.load import find_parts

    find_parts(Path(folder), base)  # what cannot be opened is said now
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


class LanguageModel:
    """A model that answers. Nothing of it is in memory before the first answer."""

    def __init__(
        self,
        folder: Path,
        *,
        base: str | None = None,
        device_map: str | dict[str, Any] | None = "auto",
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """``folder``: or a hub name. ``given``: what a training run is to make of it, by the names of
        ``FastLanguageModel``.
        """
        self.folder, self.base, self.device_map = folder, base, device_map
        self.given = dict(given or {"model_name": str(folder)})
        self.run: TrainedRun | None = None

    def __repr__(self) -> str:
        return f"LanguageModel({str(self.folder)!r})"

    def trained(self, folder: Path) -> None:
        """From now on it is what the run in ``folder`` has saved."""
        from manyhands.api.runs import TrainedRun

        self.folder, self.base, self.run = folder, None, TrainedRun(folder)
        vars(self).pop("answerer", None)

    def save_pretrained(self, folder: str | os.PathLike[str], **ignored: Any) -> None:
        """Copies what the run has written, a PEFT adapter or a model, to ``folder``."""
        if self.run is None:
            raise UserError(
                "the model has not been trained", where=str(self.folder), fix="save it after Trainer(...).train()"
            )
        [output] = list(self.run.outputs.values())[:1]
        shutil.copytree(output, folder, dirs_exist_ok=True)

    def generate(self, prompts: Any = None, *, max_new_tokens: int = 256, **tensors: Any) -> Any:
        """The greedy answer to each prompt, in order: a question, or a conversation as a list of messages with role
        and content. A single question gets a single answer.

        ``input_ids`` and other tensors go to transformers' own ``generate``, which returns ids.
        """
        if tensors:
            if prompts is not None:
                raise UserError("prompts and tensors are both given", where="generate", fix="give one of them")
            return self.answerer.model.generate(max_new_tokens=max_new_tokens, **tensors)
        if isinstance(prompts, str):
            return self._answer(prompts, max_new_tokens)
        if not isinstance(prompts, Sequence):
            raise UserError(
                f"prompts are a {type(prompts).__name__}", fix='give a list, such as ["Why is the sky blue?"]'
            )
        return [self._answer(prompt, max_new_tokens) for prompt in prompts]

    def _answer(self, prompt: str | Conversation, max_new_tokens: int) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        return self.answerer.answer(messages, max_new_tokens)

    @cached_property
    def answerer(self) -> Any:
        """``infer.load.Answerer``: the model in memory, its tokenizer and what ends an answer."""
        from manyhands.facts.hub import locate_model
        from manyhands.infer.load import open_answerer

        folder = self.folder
        if self.run is None and not folder.is_dir():
            folder = locate_model(str(folder), self.given.get("revision"), True)
        return open_answerer(folder, self.base, self._devices())

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, with the chat template that the run used."""
        return self.answerer.tokenizer

    def _devices(self) -> str | dict[str, Any] | None:
        """One GPU, or none, needs no map."""
        import torch

        return None if self.device_map == "auto" and torch.cuda.device_count() < 2 else self.device_map
