"""What was in memory when a folder was written: one hash for each tensor. Kept outside that folder; knows no models."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import write_atomically
from manyhands.core.progress import advance

Kind = Literal["model", "adapter"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorReference(_Part):
    """``sha256`` is of the values' bytes, row-major, in the saved dtype."""

    dtype: str  # torch's name without the prefix: bfloat16
    shape: tuple[int, ...]
    sha256: str


class Reference(_Part):
    """Every tensor that the written folder must hold, by its name in the files, and no other; ids of tokens that were
    added.
    """

    version: Literal[1] = 1
    kind: Kind
    dtype: str
    tensors: dict[str, TensorReference]
    tokens: dict[str, int] = {}
    copied: tuple[str, ...] = ()  # of the tensors, those that no model in memory held: taken from the source's files
    base: Literal["reference", "nf4"] = (
        "reference"  # of an adapter: how its run held the weights that it was trained beside
    )

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
