"""What was in memory when a folder was written: one hash for each tensor. Kept outside that folder; knows no models."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import write_atomically
from manyhands.core.progress import advance
from manyhands.export.files import write_tensors
from manyhands.model.weights import Storage

Kind = Literal["model", "adapter"]

KindOfBase = Literal["unquantized"] | Storage


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorReference(_Part):
    """``sha256`` is of the values' bytes, row-major, in the saved dtype."""

    dtype: str  # torch's name without the prefix: bfloat16
    shape: tuple[int, ...]
    sha256: str


class Reference(_Part):
    """All tensors that the written folder must hold, by their names in files; ids of added tokens."""

    version: Literal[1] = 1
    kind: Kind
    dtype: str
    tensors: dict[str, TensorReference]
    tokens: dict[str, int] = {}
    copied: tuple[str, ...] = ()  # of the tensors, those that no model in memory held: taken from the source's files
    seconds: tuple[str, ...] = ()  # of the tensors, second names of others, for transformers' own reader
    # of an adapter: how its run held the frozen weights; nf4_single: without double quantization; fp8: e4m3 values
    base: KindOfBase = "unquantized"

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Reference:
        """UserError if the file is missing or no reference."""
        try:
            return Reference.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise UserError(
                "the reference to verify against is missing", where=str(path), exit_code=EXIT_FAILED
            ) from None
        except ValidationError as error:
            raise UserError(
                "the reference cannot be read",
                where=str(path),
                why=str(error.errors()[0]["msg"]),
                exit_code=EXIT_FAILED,
            ) from None


def describe_tensor(tensor: torch.Tensor) -> TensorReference:
    """Dtype, shape and hash of a whole tensor on the CPU."""
    found = TensorReference(dtype=name_dtype(tensor.dtype), shape=tuple(tensor.shape), sha256=hash_values(tensor))
    advance()
    return found


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def hash_values(tensor: torch.Tensor) -> str:
    """SHA-256 of the values' bytes, row-major."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


# Root mean square of the difference of centered logits, as a share of theirs, that the dtype of the computation and the
# rounding of saved weights (of a merged model; others are compared after it) may each cause. Measured with the demo's
# model: computed in bfloat16 2.1e-2, float32 weights saved in bfloat16 5e-3.
COMPUTED = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
SAVED = {"float64": 0.0, "float32": 0.0, "float16": 5e-3, "bfloat16": 2e-2}


INPUT = "input."  # in a probe's file, before the names of a forward pass's further inputs


@dataclass(frozen=True)
class Probe:
    """``input_ids`` (1, t) int64; ``logits`` (1, n, v) float32 of the last n of them; ``dtype`` that the logits were
    computed in; ``inputs``: images, as the model's forward pass takes them.
    """

    input_ids: torch.Tensor
    logits: torch.Tensor
    dtype: str
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def tolerance(self, saved_dtype: str, reopened_dtype: str) -> float:
        """Allowed ``deviation`` of a model saved in one dtype and computed, after reopening, in another."""
        return max(COMPUTED[self.dtype], COMPUTED[reopened_dtype], SAVED[saved_dtype])

    def deviation(self, logits: torch.Tensor) -> float:
        """|c(logits) - c(expected)| / |c(expected)| with c(x) = x - its mean over the vocabulary; infinite if not
        comparable.

        Centered, because a softmax does not see a common offset, which may be most of the norm.
        """
        if logits.shape != self.logits.shape or not bool(logits.isfinite().all()):
            return float("inf")
        ours, expected = (x.double() - x.double().mean(-1, keepdim=True) for x in (logits, self.logits))
        return ((ours - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@torch.no_grad()
def round_weights(model: torch.nn.Module, dtype: str) -> None:
    """Give each weight the value that a file in ``dtype`` holds, in place, shards too: logits then are those of what is
    saved.

    A weight that was saved in bfloat16 before its training moves by less than half a digit in many of its steps, so
    rounding takes back a part of a short training. That is no fault of the file, and its logits are compared with what
    it must give.
    """
    saved = getattr(torch, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize > saved.itemsize:
            parameter.copy_(parameter.to(saved).to(parameter.dtype))


def save_probe(
    path: Path,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    dtype: str,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """``input_ids`` (t) or (1, t); ``logits`` (n, v) or (1, n, v) of the last n, saved in float32; ``dtype``: the
    compute dtype; ``inputs`` as of ``Probe``.
    """
    num_tokens = input_ids.numel()
    tensors = {
        "input_ids": input_ids.detach().reshape(1, num_tokens).to("cpu", torch.int64).contiguous(),
        "logits": logits.detach().reshape(1, -1, logits.shape[-1]).to("cpu", torch.float32).contiguous(),
    }
    for name, tensor in (inputs or {}).items():
        wide = torch.float32 if tensor.is_floating_point() else tensor.dtype
        tensors[INPUT + name] = tensor.detach().to("cpu", wide).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, tensors, {"dtype": dtype})


def load_probe(path: Path) -> Probe:
    """UserError if the file is missing or holds something else."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # a safetensors file is no iterator
            inputs = {name.removeprefix(INPUT): file.get_tensor(name) for name in names if name.startswith(INPUT)}
            dtype = (file.metadata() or {}).get("dtype", "float32")
            return Probe(file.get_tensor("input_ids"), file.get_tensor("logits"), dtype, inputs)
    except (OSError, SafetensorError) as error:
        raise UserError(
            "the probe's logits cannot be read", where=str(path), why=str(error), exit_code=EXIT_FAILED
        ) from None
