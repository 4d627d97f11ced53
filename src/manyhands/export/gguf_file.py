"""Writes a model as one GGUF file by llama.cpp's own tools, and checks its tensors by name."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import read_json
from manyhands.core.text import code_block
from manyhands.export.files import begin_folder, commit_folder
from manyhands.export.record import CARD, mark_verified
from manyhands.export.verify import MAX_DETAILS, weight_files
from manyhands.export.verify_process import RANK_VARIABLES

SCRIPT = "convert_hf_to_gguf.py"
COMMAND = "convert-hf-to-gguf"  # as a package of the registry installs it
QUANTIZER = "llama-quantize"
# Of the file: what the converter writes by itself, and what llama.cpp's quantizer makes of that.
CONVERTED = ("f32", "f16", "bf16", "q8_0")
QUANTIZED = ("q2_k", "q3_k_m", "q4_0", "q4_k_s", "q4_k_m", "q5_0", "q5_k_s", "q5_k_m", "q6_k")
LOSSLESS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # by the dtype of the model's weights
SHOWN_LINES = 15
SECRETS = ("TOKEN", "SECRET", "PASSWORD", "API_KEY")
EXPERT = re.compile(r"\.experts\.\d+\.")  # GGUF stacks the experts of a layer
COMPUTED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # by the converter


@dataclass(frozen=True)
class Tools:
    """Commands without their arguments. ``quantizer`` is empty where the type needs none."""

    converter: tuple[str, ...]
    quantizer: tuple[str, ...] = ()


def find_tools(llama_cpp: Path | None, kind: str) -> Tools:
    """What converts to ``kind``: in llama.cpp's folder (or the script itself), else from PATH. Raises UserError."""
    if kind not in (*CONVERTED, *QUANTIZED):
        raise UserError(
            f"{kind!r} is not a supported GGUF type",
            where="--gguf",
            fix=f"choose one of {', '.join(CONVERTED)}; or, with llama.cpp built, {', '.join(QUANTIZED)}",
        )
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "the package gguf is not installed",
            where="--gguf",
            why="the written file is opened again and its tensors are compared with the model's",
            fix="pip install 'manyhands[gguf]'",
        )
    return Tools(_find_converter(llama_cpp), _find_quantizer(llama_cpp, kind) if kind in QUANTIZED else ())


def _find_converter(llama_cpp: Path | None) -> tuple[str, ...]:
    if llama_cpp is None:
        found = shutil.which(SCRIPT) or shutil.which(COMMAND)
        if found is None:
            raise UserError(
                "llama.cpp's converter is not on PATH",
                where="--gguf",
                why=f"neither {SCRIPT} nor {COMMAND} is there",
                fix="git clone https://github.com/ggml-org/llama.cpp, and add --llama-cpp path/to/llama.cpp",
            )
        return (found,)
    script = llama_cpp / SCRIPT if llama_cpp.is_dir() else llama_cpp
    if not script.is_file():
        raise UserError(
            "llama.cpp's converter is not there",
            where=str(script),
            why=f"--llama-cpp is llama.cpp's folder, which holds {SCRIPT}, or that file",
            fix="git clone https://github.com/ggml-org/llama.cpp, and name that folder",
        )
    return (sys.executable, str(script))


def _find_quantizer(llama_cpp: Path | None, kind: str) -> tuple[str, ...]:
    folder = llama_cpp if llama_cpp is None or llama_cpp.is_dir() else llama_cpp.parent
    places = [folder / "build" / "bin", folder / "bin", folder] if folder is not None else []
    for place in places:
        if os.access(place / QUANTIZER, os.X_OK) and (place / QUANTIZER).is_file():
            return (str(place / QUANTIZER),)
    found = shutil.which(QUANTIZER)
    if found is None:
        raise UserError(
            f"{kind} needs {QUANTIZER}, which is not there",
            where=str(places[0] / QUANTIZER) if places else "PATH",
            why=f"llama.cpp's converter itself writes {', '.join(CONVERTED)}",
            fix="build it in llama.cpp's folder: cmake -B build && cmake --build build --target llama-quantize; "
            "or choose --gguf q8_0",
        )
    return (found,)


def refuse_own_code(model: Path) -> None:
    """UserError for a model with Python files of its own: llama.cpp's converter would run them."""
    for name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in (read_json(model / name) or {}):
            raise UserError(
                "llama.cpp's converter would run this model's own code",
                where=str(model / name),
                why="it has an auto_map, and model.trust_remote_code is not set",
                fix="set model.trust_remote_code in the run file if you trust that code",
            )


def refuse_towers(model: Path) -> None:
    """UserError for a model of images or sound: the format has its towers in a second file."""
    config = read_json(model / "config.json") or {}
    towers = [key for key in ("vision_config", "audio_config") if config.get(key)]
    if towers:
        raise UserError(
            "a GGUF file holds a language model, and this model has towers too",
            where=f"{model / 'config.json'}: {', '.join(towers)}",
            why="llama.cpp keeps them in a second file (mmproj), which is not compared here",
            fix="manyhands export RUN --merge, and llama.cpp's converter on that folder, with --mmproj for the towers",
        )


def write_gguf_folder(model: Path, output: Path, name: str, kind: str, tools: Tools) -> str:
    """Writes ``name-kind.gguf`` with the model's card; returns a line. UserError, and no folder, for any fault."""
    partial = begin_folder(output, replace=False)
    try:
        file = partial / f"{name}-{kind}.gguf"
        _convert(model, file, kind, tools)
        count, findings = compare_names(file, model)
        if findings:
            hidden = len(findings) - MAX_DETAILS
            raise UserError(
                "the GGUF file does not have the tensors of the model",
                where=file.name,
                why=f"{len(findings)} findings",
                fix="it was removed; try another version of llama.cpp, or report this with the findings",
                details=findings[:MAX_DETAILS] + ([f"... and {hidden} more"] if hidden > 0 else []),
                exit_code=EXIT_FAILED,
            )
        if (model / CARD).is_file():
            text = (model / CARD).read_text(encoding="utf-8")
            (partial / CARD).write_text(describe_file(text, file.name), encoding="utf-8")
        commit_folder(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    note = f"{count} tensors, all of the model's by name"
    mark_verified(output, note)
    return f"verified {output / file.name}: {note}"


def compare_names(file: Path, model: Path) -> tuple[int, list[str]]:
    """The number of tensors in ``file``, and how names differ from ``model``'s renamed by gguf's own map."""
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

    reader = GGUFReader(file)
    header = reader.get_field("general.architecture")
    arch = next((kind for kind, name in MODEL_ARCH_NAMES.items() if header and name == header.contents()), None)
    config = read_json(model / "config.json") or {}
    text = config.get("text_config") or config
    names = get_tensor_name_map(arch, text["num_hidden_layers"]) if arch is not None else None
    expected: set[str] = set()
    for path in weight_files(model, "model"):
        with safe_open(path, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118  (safe_open is no mapping)
                key = EXPERT.sub(".experts.", key)
                expected.add((names and names.get_name(key, try_suffixes=(".weight", ".bias"))) or key)
    written = {tensor.name for tensor in reader.tensors}
    missing = expected - written - ({"output.weight"} if text.get("tie_word_embeddings") else set())
    extra = written - expected - COMPUTED
    return len(reader.tensors), [f"{name} is missing" for name in sorted(missing)] + [
        f"{name} is extra: the model has no such tensor" for name in sorted(extra)
    ]


def describe_file(card: str, name: str) -> str:
    """The model's card for a folder with the GGUF file ``name``: its library, and how llama.cpp opens it."""
    card = card.replace("library_name: transformers\n", "library_name: gguf\n", 1)
    before, _, _ = card.partition("## Loading\n")
    command = f"llama-cli -m {shlex.quote(name)}          # or llama-server, ollama, LM Studio"
    return before + "\n".join(["## Loading", "", *code_block(command, "bash"), ""])


def _convert(model: Path, file: Path, kind: str, tools: Tools) -> None:
    if not tools.quantizer:
        _run([*tools.converter, str(model), "--outfile", str(file), "--outtype", kind], file)
        return
    wide = file.with_name("wide.gguf")
    dtype = json.loads((model / "config.json").read_text(encoding="utf-8")).get("dtype", "float32")
    outtype = LOSSLESS.get(dtype, "f32")
    _run([*tools.converter, str(model), "--outfile", str(wide), "--outtype", outtype], wide)
    _run([*tools.quantizer, str(wide), str(file), kind.upper()], file)
    wide.unlink()


def _run(command: Sequence[str], file: Path) -> None:
    """UserError with the command's last lines where it fails or leaves no ``file``. No secrets, no hub."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not any(word in name.upper() for word in SECRETS)
    }
    print(f"running {' '.join(command[:2] if command[0] == sys.executable else command[:1])}", flush=True)
    done = subprocess.run(
        command,
        env=kept | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode == 0 and file.is_file():
        return
    lines = [line for line in done.stdout.replace("\r", "\n").splitlines() if line.strip()]
    missing = next((line for line in reversed(lines) if line.startswith("ModuleNotFoundError: ")), "")
    package = missing.partition("'")[2].rstrip("'").partition(".")[0]
    raise UserError(
        f"{Path(command[1] if command[0] == sys.executable else command[0]).name} failed",
        where=" ".join(command),
        why=lines[-1] if lines else f"exit code {done.returncode}, without a word",
        fix=f"pip install {package}" if package else "see its messages above; a newer llama.cpp knows more models",
        details=lines[-SHOWN_LINES:],
        exit_code=EXIT_FAILED,
    )
