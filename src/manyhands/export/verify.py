"""``python -m manyhands.export.verify FOLDER --reference FILE``: does a written folder hold what was in memory?

For a process of its own, so that nothing of the training one can hide a fault: the files are read tensor by tensor,
then reopened by transformers' or PEFT's public API where they fit into memory, and compared bit for bit. Knows only
files.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from manyhands.convert.experts import round_experts
from manyhands.convert.fp8 import StoredFp8Linear, round_to_fp8
from manyhands.convert.nf4 import Nf4Linear
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.text import print_safely
from manyhands.core.units import count_of
from manyhands.export.reference import Kind, Probe, Reference, TensorReference, describe_tensor, load_probe, name_dtype
from manyhands.facts.adapter import WEIGHTS, needed_tokens, nf4_options
from manyhands.infer.load import dequantizing
from manyhands.model.attention import plain_attention
from manyhands.model.multimodal import masks_of_generation
from manyhands.model.resize_embeddings import resize_embeddings, rows_by_token
from manyhands.model.source import state_by_file_names
from manyhands.model.structure import auto_class_of

INDEX = "model.safetensors.index.json"
MAX_DETAILS = 20
MEMORY_FACTOR = 1.3  # a reopened model needs its weights, and something to work with


@dataclass
class Verification:
    """``findings``: what is wrong, each with its tensor's name; empty if all is well. ``notes``: how it was checked."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(
    folder: Path, reference: Reference, *, base: Path | None = None, probe_path: Path | None = None
) -> Verification:
    """Findings of ``folder`` against ``reference``. ``base``: an adapter's. ``probe_path``: of ``save_probe``."""
    found = Verification(findings=compare_files(folder, reference))
    found.notes.append(f"{count_of(len(reference.tensors), 'tensor')} compared in the files")
    if found.findings:
        return found
    obstacle = reason_not_reopened(folder, reference, base)
    if obstacle:
        found.notes.append(f"not reopened, {obstacle}: compared tensor by tensor on the files only")
        return found
    probe = load_probe(probe_path) if probe_path is not None else None
    if reference.kind == "model":
        opener = auto_class_of(folder)
        model, state, opened_by = *_open_model(opener, folder, reference.dtype), opener.__name__
    else:
        assert base is not None
        model, state, opened_by = (
            *_open_adapter(folder, base, probe.dtype if probe else "auto", reference.base),
            "PeftModel",
        )
    found.findings += compare_reopened(state, reference) + compare_tokens(folder, reference)
    found.notes.append(f"reopened by {opened_by}.from_pretrained")
    if probe is not None and not found.findings:
        _compare_logits(model, probe, reference.dtype, found)
    return found


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadTensor:
    """``tensor`` is None if it cannot be read, and ``problem`` says why."""

    name: str
    tensor: torch.Tensor | None
    problem: str = ""


def weight_files(folder: Path, kind: Kind) -> list[Path]:
    """The files that a loader would read. UserError if one of them, or all, are missing."""
    if kind == "adapter":
        paths = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            raise UserError("a weights file is missing", where=str(path), exit_code=EXIT_FAILED)
    return paths


def iterate_stored(paths: Iterable[Path]) -> Iterator[ReadTensor]:
    """Every tensor of the files, one in memory at a time; a file that cannot be opened gives one item of its name."""
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    yield ReadTensor(name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            yield ReadTensor(path.name, None, str(error))


def compare_files(folder: Path, reference: Reference) -> list[str]:
    """Findings from the safetensors files alone."""
    try:
        stored = list(weight_files(folder, reference.kind))
    except UserError as error:
        return [f"{error.what}: {error.where}"]
    findings: list[str] = []
    seen: set[str] = set()
    for item in iterate_stored(stored):
        if item.name in seen:
            findings.append(f"{item.name} is stored twice")
        seen.add(item.name)
        findings += _compare_stored(item, reference)
    findings += [f"{name} is missing" for name in reference.tensors if name not in seen]
    return findings


def _compare_stored(item: ReadTensor, reference: Reference) -> list[str]:
    if item.tensor is None:
        return [f"{item.name} cannot be read: {item.problem}"]
    expected = reference.tensors.get(item.name)
    if expected is None:
        return [f"{item.name} is extra: the trained model has no such tensor"]
    findings = compare_tensor(item.name, item.tensor, expected)
    if item.tensor.is_floating_point() and not bool(item.tensor.isfinite().all()):
        findings.append(f"{item.name} holds NaN or infinite values")
    if ".lora_B." in item.name and not bool(item.tensor.any()):
        findings.append(f"{item.name} is all zero: this adapter changes nothing there")
    return findings


def compare_tensor(name: str, tensor: torch.Tensor, expected: TensorReference) -> list[str]:
    actual = describe_tensor(tensor)
    if actual.shape != expected.shape:
        return [f"{name} has shape {list(actual.shape)} instead of {list(expected.shape)}"]
    if actual.dtype != expected.dtype:
        return [f"{name} has dtype {actual.dtype} instead of {expected.dtype}"]
    if actual.sha256 != expected.sha256:
        return [f"{name} has other values than were in memory"]
    return []


# ---- reopened --------------------------------------------------------------------------------------------------------


def reason_not_reopened(folder: Path, reference: Reference, base: Path | None) -> str:
    """Why the folder cannot be reopened here; empty if it can."""
    import psutil

    weights = folder if reference.kind == "model" else base
    if reference.kind == "adapter":
        try:
            import peft  # noqa: F401
        except ImportError:
            return "peft is not installed"
        if base is None or not any(base.glob("*.safetensors")):
            return "the base model's weights are not at hand"
        if reference.base.startswith("nf4") and importlib.util.find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed"
    assert weights is not None
    if _needs_its_own_code(weights):
        return "the model needs code of its own, which is not run here"
    widened = 4 if reference.base == "mxfp4" else 1  # opened in 16 bits at least
    needed = MEMORY_FACTOR * widened * sum(path.stat().st_size for path in weights.glob("*.safetensors"))
    available = psutil.virtual_memory().available
    if needed > available:
        return f"the model needs {needed / 2**30:.1f} GiB of memory and {available / 2**30:.1f} GiB are free"
    return ""


def _needs_its_own_code(folder: Path) -> bool:
    from transformers import CONFIG_MAPPING

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING


def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _open_model(opener: Any, folder: Path, dtype: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model and its state by the files' names."""
    _quiet()
    model: Any = opener.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.set_attn_implementation(plain_attention(model.config))
    return model, state_by_file_names(model, folder)


def _open_adapter(folder: Path, base: Path, dtype: str, kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The adapted model and the adapter's state; ``dtype``: of the base. ``kind``: ``Reference.base``."""
    from peft import PeftModel, get_peft_model_state_dict

    _quiet()
    options = {}
    if kind.startswith("nf4"):
        stored = json.loads((base / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        options = {"device_map": {"": "cpu"}} | ({} if stored else _nf4_options(double_quant=kind == "nf4"))
    elif kind == "mxfp4":
        options = dequantizing(base)
    inner: Any = auto_class_of(base).from_pretrained(base, dtype=dtype, **options)
    inner.set_attn_implementation(plain_attention(inner.config))
    if kind == "mxfp4":
        inner = inner.to(inner.dtype)  # experts come in bfloat16
    if kind.startswith("nf4"):
        dequantize_as_one_row(inner, None if dtype == "auto" else getattr(torch, dtype))
        round_experts(inner, Nf4Linear, kind == "nf4")  # bitsandbytes leaves them as they are
    if kind == "fp8":
        round_to_fp8(inner)
        round_experts(inner, StoredFp8Linear)
    resize_embeddings(inner, needed_tokens(folder, rows_by_token(inner)))
    model = PeftModel.from_pretrained(inner, str(folder))
    return model, get_peft_model_state_dict(model, save_embedding_layers=False)  # True adds a grown base's embeddings


def _nf4_options(*, double_quant: bool) -> dict[str, Any]:
    """Makes transformers hold a model as QLoRA does, by bitsandbytes alone; computed in float32."""
    from transformers import BitsAndBytesConfig

    quantized = BitsAndBytesConfig(**nf4_options(double_quant=double_quant), bnb_4bit_compute_dtype=torch.float32)
    return {"quantization_config": quantized}


def dequantize_as_one_row(model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Gives layers of bitsandbytes a forward pass that is right for rows of any length on every CPU.

    Its own (0.50.2) rounds scales to bfloat16 on CPUs that multiply in it, fails there for rows that are not whole
    blocks of 64, and on other AVX-512 CPUs gets rows wrong that end in half a block. Blocks run over the flattened
    weight. ``dtype``: of the dequantized weight, in place of the one that the model's files name. PEFT's DoRA
    dequantizes by itself, for the lengths of rows, and is given the same weight.
    """
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
    from peft.tuners.lora import dora

    def dequantize(layer: Any) -> torch.Tensor:
        state = copy.copy(layer.weight.quant_state)
        state.shape, state.dtype = (layer.out_features * layer.in_features,), dtype or state.dtype
        return dequantize_4bit(layer.weight.data, state).view(layer.out_features, layer.in_features)

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, dequantize(layer).to(x.dtype), layer.bias)

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.forward = functools.partial(forward, module)
    of_peft = dora.dequantize_module_weight
    dora.dequantize_module_weight = lambda layer: dequantize(layer) if isinstance(layer, Linear4bit) else of_peft(layer)


def compare_tokens(folder: Path, reference: Reference) -> list[str]:
    """Findings in the written tokenizer, where tokens were added to it."""
    if not reference.tokens:
        return []
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = {token: tokenizer.encode(token, add_special_tokens=False) for token in reference.tokens}
    return [
        f"the tokenizer reads {token} as {found[token]}, not {[number]}"
        for token, number in reference.tokens.items()
        if found[token] != [number]
    ]


def compare_reopened(state: dict[str, torch.Tensor], reference: Reference) -> list[str]:
    """Findings in what the public API made of the files. PEFT may widen factors, which narrows back without loss."""
    findings = [
        f"{name} is missing after reopening"
        for name in reference.tensors
        if name not in state and name not in reference.copied and name not in reference.seconds
    ]
    findings += [
        f"{name} appears only after reopening: its values are new" for name in state if name not in reference.tensors
    ]
    for name in reference.tensors.keys() & state.keys():
        expected = reference.tensors[name]
        tensor = state[name].to(getattr(torch, expected.dtype))
        findings += [f"after reopening, {finding}" for finding in compare_tensor(name, tensor, expected)]
    return findings


@torch.no_grad()
def _compare_logits(model: torch.nn.Module, probe: Probe, saved_dtype: str, found: Verification) -> None:
    wide = _widen(model, probe.dtype).eval()
    dtype = next(wide.parameters()).dtype
    inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in probe.inputs.items()}
    inputs |= masks_of_generation(wide, inputs)
    logits = wide(input_ids=probe.input_ids, use_cache=False, **inputs).logits[:, -probe.logits.shape[1] :]
    deviation, tolerance = probe.deviation(logits), probe.tolerance(saved_dtype, name_dtype(logits.dtype))
    seen = " behind an image" if probe.inputs else ""
    text = f"logits of {probe.logits.shape[1]} tokens{seen} deviate by {deviation:.1e} (allowed {tolerance:.0e})"
    if deviation > tolerance and getattr(torch, saved_dtype).itemsize < getattr(torch, probe.dtype).itemsize:
        text += f"; rounding to {saved_dtype} may take small updates back, which output.dtype={probe.dtype} keeps"
    (found.notes if deviation <= tolerance else found.findings).append(text)


def _widen(model: torch.nn.Module, dtype: str) -> torch.nn.Module:
    """The same weights in float32 (float64 if the run used it), if they fit: else half the difference is ours."""
    import psutil

    wide = torch.float64 if dtype == "float64" else torch.float32
    needed = wide.itemsize * sum(p.numel() for p in model.parameters() if p.dtype != wide)
    return model.to(wide) if needed < psutil.virtual_memory().available else model


# ---- command ---------------------------------------------------------------------------------------------------------


def refuse(folder: Path, findings: list[str]) -> UserError:
    hidden = len(findings) - MAX_DETAILS
    kind = "adapter" if (folder / WEIGHTS).exists() else "model"
    return UserError(
        f"verification failed: the written {kind} is not what was trained",
        where=str(folder),
        why=f"{len(findings)} findings",
        fix="do not use this folder; the run's checkpoints are untouched: `manyhands export RUN` writes it again",
        details=findings[:MAX_DETAILS] + ([f"... and {hidden} more"] if hidden > 0 else []),
        exit_code=EXIT_FAILED,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "manyhands.export.verify", description="Reopen a written folder and compare it with what was in memory."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--reference", type=Path, required=True, help="reference.json, written beside the folder by the export"
    )
    parser.add_argument("--base", type=Path, help="folder of an adapter's base model")
    parser.add_argument("--logits", type=Path, help="input_ids and logits (safetensors) of the model in memory")
    arguments = parser.parse_args(argv)
    try:
        found = verify(
            arguments.folder, Reference.read(arguments.reference), base=arguments.base, probe_path=arguments.logits
        )
        if found.findings:
            raise refuse(arguments.folder, found.findings)
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    print(f"verified {arguments.folder}: " + "; ".join(found.notes))
    return 0


if __name__ == "__main__":
    print_safely()
    sys.exit(main(sys.argv[1:]))
