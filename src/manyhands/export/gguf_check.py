"""Is a GGUF file the model that it was made of? Opened with gguf's own reader and compared tensor by tensor with the
safetensors files, and with the tokenizer of that folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from manyhands.data.tokenizer import load_tokenizer
from manyhands.export.verify import Verification, weight_files

# Architectures by llama.cpp's names whose weights are compared value by value, and how the file holds them otherwise
# than safetensors do: rows of q and k in the pairs that its rotation takes, 1 added to the weights of norms.
AS_THEY_ARE = frozenset({"qwen2", "qwen3", "qwen3moe", "olmo2"})
ROTATED = frozenset({"llama", "granite", "smollm3"})
NORMS_PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3"})
# Root mean square of the error as a share of the weights' own: twice to three times what normally distributed weights
# lose (quantized by llama.cpp, measured by tests/export/test_gguf.py). A tensor in a wrong order is off by 1.4.
ALLOWED = {
    "Q2_K": 0.6,
    "Q3_K": 0.35,
    "Q4_0": 0.2,
    "Q4_1": 0.2,
    "Q4_K": 0.2,
    "Q5_0": 0.1,
    "Q5_1": 0.1,
    "Q5_K": 0.1,
    "Q6_K": 0.05,
}
BLOCK = 32  # values of a block of Q8_0, which share one scale
EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # by the converter


def compare_gguf(path: Path, model: Path, kind: str) -> Verification:
    """Compares the file of type ``kind`` with the folder ``model``: tensors by number, name, shape and value; the
    vocabulary, its merges, the special tokens, the chat template.
    """
    from gguf import GGUFReader, LlamaFileType

    found = Verification()
    reader = GGUFReader(path)
    arch = read_field(reader, "general.architecture")
    expected = LlamaFileType[{"f32": "ALL_F32"}.get(kind, f"MOSTLY_{kind.upper()}")]
    if read_field(reader, "general.file_type") != expected:
        found.findings.append(f"the file's type is {read_field(reader, 'general.file_type')}, not {expected} ({kind})")
    _compare_tensors(reader, arch, model, found)
    _compare_tokenizer(reader, model, found)
    return found


def read_field(reader: Any, name: str) -> Any:
    """The value of a field of the file's header; None where it has none."""
    field = reader.get_field(name)
    return None if field is None else field.contents()


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _compare_tensors(reader: Any, arch: str, model: Path, found: Verification) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    known = arch in AS_THEY_ARE | ROTATED | NORMS_PLUS_ONE
    written = {tensor.name: tensor for tensor in reader.tensors}
    seen: set[str] = set()
    for name, source in iterate_sources(model, name_map(arch, config["num_hidden_layers"])):
        if name == "output.weight" and name not in written and config.get("tie_word_embeddings"):
            continue  # stored twice in the source
        tensor = written.get(name)
        if tensor is None:
            found.findings.append(f"{name} is missing")
            continue
        seen.add(name)
        shape = [int(size) for size in reversed(tensor.shape)]
        if shape != list(source.shape):
            found.findings.append(f"{name} has shape {shape} instead of {list(source.shape)}")
        elif known:
            found.findings += compare_values(name, tensor, arrange(name, source, arch, config))
    extra = [name for name in written if name not in seen and name not in COMPUTED]
    found.findings += [f"{name} is extra: the model has no such tensor" for name in extra]
    text = f"{len(seen)} of {len(reader.tensors)} tensors compared with the model's files"
    computed = [name for name in written if name in COMPUTED]
    text += f", {', '.join(computed)} made by the converter" if computed else ""
    found.notes.append(
        text if known else f"{text} by name and shape; NOT by value: how {arch} arranges them is not known here"
    )


def name_map(arch: str, num_layers: int) -> Callable[[str], str | None]:
    """The file's name of a tensor of transformers; None where gguf's map has none."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == arch), None)
    names = get_tensor_name_map(kind, num_layers) if kind is not None else None
    return lambda name: names.get_name(name, try_suffixes=(".weight", ".bias")) if names is not None else None


def iterate_sources(model: Path, rename: Callable[[str], str | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """(the file's name, tensor) of everything in the model's safetensors; experts of a layer stacked, as GGUF has them.

    A name that gguf's map lacks stays as it is, and so is missing in the file.
    """
    experts: dict[str, dict[int, torch.Tensor]] = {}
    names: list[tuple[str, Path]] = []
    for path in weight_files(model, "model"):
        with safe_open(path, framework="pt") as file:
            names += [(name, path) for name in file.keys()]  # noqa: SIM118  (safe_open is no mapping)
    counts: dict[str, int] = {}
    for name, _ in names:
        if EXPERT.search(name):
            stacked = EXPERT.sub(".experts.", name)
            counts[stacked] = counts.get(stacked, 0) + 1
    for name, path in names:
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        part = EXPERT.search(name)
        if part is None:
            yield rename(name) or name, tensor
            continue
        stacked = EXPERT.sub(".experts.", name)
        layers = experts.setdefault(stacked, {})
        layers[int(part[1])] = tensor
        if len(layers) == counts[stacked]:
            yield rename(stacked) or stacked, torch.stack([one for _, one in sorted(experts.pop(stacked).items())])


def arrange(name: str, tensor: torch.Tensor, arch: str, config: Mapping[str, Any]) -> torch.Tensor:
    """``tensor`` as the file of this architecture holds it, in float32."""
    tensor = tensor.float()
    if arch in NORMS_PLUS_ONE and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2], "")
    if arch not in ROTATED or not heads:
        return tensor
    num_heads = config.get(heads) or config["num_attention_heads"]
    halves = tensor.unflatten(0, (num_heads, 2, -1))  # (heads, half, pair, ...) -> (heads, pair, half, ...)
    return halves.transpose(1, 2).flatten(0, 2)


def compare_values(name: str, tensor: Any, expected: torch.Tensor) -> list[str]:
    """Findings in one tensor: ``expected`` float32 in the file's arrangement. Exact for floating types, within half a
    step of its block for Q8_0, within the share of ``ALLOWED`` for the others.
    """
    from gguf.quants import dequantize

    kind = tensor.tensor_type.name
    with np.errstate(invalid="ignore"):  # of infinite scales, which are found below
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    values = values.reshape(expected.shape)
    if not bool(values.isfinite().all()):
        largest = expected.abs().max().item()
        return [f"{name} ({kind}) holds NaN or infinite values; the model's go up to {largest:.6g}"]
    if kind in EXACT:
        wanted = expected.to(EXACT[kind]).float()
        return [] if torch.equal(values, wanted) else [f"{name} ({kind}) has other values than the model"]
    if kind == "Q8_0":
        peaks = expected.reshape(-1, BLOCK).abs().amax(dim=1, keepdim=True)
        # Half a step, and the float16 of the scale: 2^-11 of it, or 2^-25 where it is subnormal, for up to 127 steps.
        bound = peaks * (0.5 / 127 + 2**-11 * 1.01) + 127 * 2**-25
        off = ((values - expected).abs().reshape(-1, BLOCK) / bound).max().item()
        return [] if off <= 1 else [f"{name} (Q8_0) is off by {off:.3g} times what rounding can cause"]
    if kind not in ALLOWED:
        return [f"{name} is of the type {kind}, which is not checked here"]
    error = ((values - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    allowed = ALLOWED[kind]
    return [] if error <= allowed else [f"{name} ({kind}) is off by {error:.2f} of its norm, and {allowed} is allowed"]


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def _compare_tokenizer(reader: Any, model: Path, found: Verification) -> None:
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    written = read_field(reader, "tokenizer.ggml.tokens") or []
    expected = {number: token for token, number in tokenizer.get_vocab().items()}
    different = [
        f"token {number} is {_at(written, number)!r} instead of {token!r}"
        for number, token in sorted(expected.items())
        if _plain(_at(written, number)) != _plain(token)
    ]
    found.findings += different[:5] + ([f"... and {len(different) - 5} other tokens"] if len(different) > 5 else [])
    for role in ("bos", "eos"):
        number, want = read_field(reader, f"tokenizer.ggml.{role}_token_id"), getattr(tokenizer, f"{role}_token_id")
        if want is not None and number != want:
            found.findings.append(f"the {role} token is {number} instead of {want}")
    note = f"{len(expected):,} tokens"
    merges = read_merges(model)
    written_merges = read_field(reader, "tokenizer.ggml.merges")
    if written_merges is not None and merges is not None:
        if written_merges != merges:
            found.findings.append("the merges of the tokenizer are others")
        note += f", {len(merges):,} merges"
    template = read_field(reader, "tokenizer.chat_template")
    if isinstance(tokenizer.chat_template, str):
        if template != tokenizer.chat_template:
            found.findings.append("the chat template is " + ("another one" if template else "missing"))
        note += " and the chat template"
    found.notes.append(f"{note} compared with the tokenizer")


def read_merges(model: Path) -> list[str] | None:
    """Of tokenizer.json, as GGUF has them: two parts and a space between; blanks within a part as Ġ. None if it has
    none.
    """
    try:
        merges = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    parts = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges]
    return [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in parts]


def _at(tokens: list[str], number: int) -> str | None:
    return tokens[number] if number < len(tokens) else None


def _plain(token: str | None) -> str | None:
    """llama.cpp writes a blank in added tokens where SentencePiece has its own symbol."""
    return None if token is None else token.replace("▁", " ")
