"""What a trained model is saved as, by the names of Unsloth, PEFT and transformers: copies of what the run has written,
exports of its checkpoint (``manyhands export``), uploads (``manyhands push``). Imports no torch.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhands.api.process import run_module
from manyhands.core.errors import UserError
from manyhands.export.record import copy_output

# Unsloth's names of GGUF types that are not llama.cpp's.
GGUF_TYPES = {"not_quantized": "bf16", "fast_quantized": "q8_0", "quantized": "q4_k_m", "f16": "f16"}
MERGED = ("merged_16bit", "lora")
# An option of a command, as it is called here.
OPTIONS = {
    "--llama-cpp path/to/llama.cpp": 'llama_cpp="path/to/llama.cpp"',
    "--base OWNER/NAME": 'base="OWNER/NAME"',
    "--public": "private=False",
    "--to your-name/your-model": '"your-name/your-model"',
}


class Outputs:
    """What ``LanguageModel`` saves, exports and uploads. ``tokenizer`` is ignored: files hold the run's own."""

    folder: Path
    outputs: dict[str, Path] | None

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, safe_serialization: bool = True, **refused: Any
    ) -> None:
        """Copies what the run has written, a PEFT adapter or a model, to ``folder``; always as safetensors."""
        if refused or not safe_serialization:
            raise UserError(
                f"{next(iter(refused), 'safe_serialization')} has no effect",
                where="save_pretrained",
                why="the files that the run has written and verified are copied",
                fix="leave it out; save_pretrained_merged merges an adapter, push_to_hub uploads",
            )
        if self.outputs is None:
            raise UserError(
                "the model has not been trained", where=str(self.folder), fix="save it after Trainer(...).train()"
            )
        output = next((path for path in self.outputs.values() if path.is_dir()), None)
        if output is None:
            raise UserError("the run has written no model", where=str(self.folder), fix="manyhands export writes one")
        copy_output(output, Path(folder))

    def save_pretrained_merged(
        self, folder: str | os.PathLike[str], tokenizer: Any = None, save_method: str = "merged_16bit"
    ) -> None:
        """Writes the model with its adapter merged, in bfloat16, to a new ``folder``, and verifies it; ``save_method``
        lora copies the adapter. What a run of all weights has written is copied.
        """
        if save_method not in MERGED:
            raise UserError(
                f"save_method is {save_method!r}",
                where="save_pretrained_merged",
                why="merged weights are in 16 bits: rounding them to 4 bits is no longer what was trained",
                fix=f"give one of {', '.join(MERGED)}; save_pretrained_gguf writes quantized files",
            )
        run = self._run()
        if save_method == "lora" or not (run / "adapter").is_dir():
            self.save_pretrained(folder)
        else:
            export(run, Path(folder), "--merge", "--dtype", "bfloat16")

    def save_pretrained_gguf(
        self,
        folder: str | os.PathLike[str],
        tokenizer: Any = None,
        quantization_method: str | Sequence[str] = "q8_0",
        *,
        llama_cpp: str | os.PathLike[str] | None = None,
    ) -> None:
        """Writes a GGUF file of this type to a new ``folder``, an adapter merged; of several types each to a folder in
        it. Needs llama.cpp's converter: on PATH, or in the folder ``llama_cpp``.
        """
        run = self._run()
        kinds = [quantization_method] if isinstance(quantization_method, str) else list(quantization_method)
        for kind in (GGUF_TYPES.get(kind.lower(), kind.lower()) for kind in kinds):
            target = Path(folder) if len(kinds) == 1 else Path(folder) / kind
            target.parent.mkdir(parents=True, exist_ok=True)
            export(run, target, "--gguf", kind, *(["--llama-cpp", os.fspath(llama_cpp)] if llama_cpp else []))

    def push_to_hub(
        self, repo_id: str, *, private: bool = True, token: str | None = None, base: str | None = None
    ) -> str:
        """Uploads what the run has written, as ``manyhands push``; returns the address. Private unless ``private`` is
        False. ``token``: by default HF_TOKEN of the environment. ``base``: the base model's name on the hub, of an
        adapter that was trained on a folder.
        """
        return _push(self._run(), repo_id, private, token, base)

    def push_to_hub_merged(
        self,
        repo_id: str,
        tokenizer: Any = None,
        save_method: str = "merged_16bit",
        *,
        private: bool = True,
        token: str | None = None,
    ) -> str:
        """``save_pretrained_merged`` to ``merged-16bit`` in the run's folder, and uploads that."""
        run = self._run()
        if save_method == "lora" or not (run / "adapter").is_dir():
            return _push(run, repo_id, private, token)
        self.save_pretrained_merged(run / "merged-16bit", save_method=save_method)
        return _push(run / "merged-16bit", repo_id, private, token)

    def push_to_hub_gguf(
        self,
        repo_id: str,
        tokenizer: Any = None,
        quantization_method: str = "q8_0",
        *,
        private: bool = True,
        token: str | None = None,
        llama_cpp: str | os.PathLike[str] | None = None,
    ) -> str:
        """``save_pretrained_gguf`` to ``gguf-TYPE`` in the run's folder, and uploads that."""
        if not isinstance(quantization_method, str):
            raise UserError("several GGUF types at once", where="push_to_hub_gguf", fix="call it for each of them")
        target = self._run() / f"gguf-{GGUF_TYPES.get(quantization_method.lower(), quantization_method.lower())}"
        self.save_pretrained_gguf(target, quantization_method=quantization_method, llama_cpp=llama_cpp)
        return _push(target, repo_id, private, token)

    def _run(self) -> Path:
        if (self.folder / "run.json").is_file():
            return self.folder
        raise UserError(
            "the model has not been trained",
            where=str(self.folder),
            fix="save it after Trainer(...).train(), or open a run: manyhands.load('runs/NAME')",
        )


def export(run: Path, output: Path, *options: str) -> None:
    """In a process of its own; among ranks rank 0 has it done."""
    from manyhands.api.start import on_first_rank

    def write() -> None:
        try:
            print(run_module("manyhands.export", str(run), "--output", str(output), *options), end="", flush=True)
        except UserError as error:
            raise _in_python(error) from None

    on_first_rank(write)


def _push(source: Path, repository: str, private: bool, token: str | None, base: str | None = None) -> str:
    from manyhands.api.start import on_first_rank
    from manyhands.export.push import plan_upload, upload

    done: list[str] = []

    def push() -> None:
        try:
            planned = plan_upload(source, repository, private=private, base=base)
            print(planned.describe(), flush=True)
            done.append(upload(planned, public=not private, token=token))
        except UserError as error:
            raise _in_python(error) from None

    on_first_rank(push)
    return done[0] if done else f"https://huggingface.co/{repository}"


def _in_python(error: UserError) -> UserError:
    """With the options of commands as parameters."""
    for option, parameter in OPTIONS.items():
        error.fix = error.fix.replace(option, parameter)
        error.details = tuple(detail.replace(option, parameter) for detail in error.details)
    return error
