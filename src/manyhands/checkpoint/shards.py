"""Which slices of a checkpoint's tensors this rank writes, and into which safetensors files. Every rank finds its own
without communication; no slice is written twice.

Files are those of torch's ``HuggingFaceStorageWriter`` (distributed/checkpoint/hf_storage.py), which
``HuggingFaceStorageReader`` reads into any layout: each holds slices, and their offsets in the full tensors under
``DCP_SHARDING_INFO`` of its header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from manyhands.core.holding import local, local_slices, replica_of

FILE_BYTES = 2 * 2**30  # so that ranks can share the reading and hashing of what few ranks have written
COPY_BYTES = 2**26  # of a device's tensor that pass through host memory at once
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Piece:
    """A slice of a full tensor; ``tensor`` shares the model's or optimizer's memory."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]  # of its first element in the full tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file: its header, and the pieces whose bytes follow it in this order."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def header(self) -> bytes:
        """What the file begins with: 8 bytes of length, then JSON, padded to a multiple of 8 bytes."""
        offsets = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in self.pieces}
        fields: dict[str, object] = {
            "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        }
        end = 0
        for piece in self.pieces:
            begin, end = end, end + piece.num_bytes
            shape, dtype = list(piece.tensor.shape), _NAMES[piece.tensor.dtype]
            fields[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(fields).encode("ascii")
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def own_files(tensors: dict[str, torch.Tensor], rank: int) -> list[ShardFile]:
    """The files that this rank writes; none where other ranks hold all that it has."""
    groups: list[list[Piece]] = []
    total = 0
    for piece in own_pieces(tensors):
        if not groups or total + piece.num_bytes > FILE_BYTES:
            groups.append([])
            total = 0
        groups[-1].append(piece)
        total += piece.num_bytes
    return [
        ShardFile(
            f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(groups):05d}.safetensors",
            tuple(sorted(group, key=lambda piece: -piece.tensor.element_size())),  # values are aligned so
        )
        for number, group in enumerate(groups, start=1)
    ]


def own_pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    """What this rank writes of ``tensors``. Replicas share them: each goes to the one that has least so far, a rule
    that gives the same on all of them.
    """
    pieces: list[Piece] = []
    loads: dict[int, list[int]] = {}
    for name, tensor in tensors.items():
        index, num_replicas = replica_of(tensor)
        load = loads.setdefault(num_replicas, [0] * num_replicas)
        writer = load.index(min(load))
        load[writer] += tensor.numel() * tensor.element_size()
        part = local(tensor)
        if writer == index and part.numel():
            pieces.append(Piece(name, part, tuple(cut.start for cut in local_slices(tensor))))
    return pieces


def read_bytes(piece: Piece) -> Iterator[memoryview]:
    """The piece's values, in host memory a part at a time."""
    flat = piece.tensor.reshape(-1)
    step = max(1, COPY_BYTES // piece.tensor.element_size())
    for start in range(0, len(flat), step):
        yield flat[start : start + step].cpu().view(torch.uint8).numpy().data
