"""Which slices of a checkpoint's tensors this rank writes, and into which safetensors files, and reading any range out
of them. Every rank finds its own without communication; no slice is written twice.

Files are those of torch's ``HuggingFaceStorageWriter`` (distributed/checkpoint/hf_storage.py), which
``HuggingFaceStorageReader`` reads into any layout: each holds slices, and their offsets in the full tensors under
``DCP_SHARDING_INFO`` of its header.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class StoredPiece:
    """Rows of a full tensor in a file: its flat values from ``first`` on."""

    path: Path
    at: int  # bytes
    first: int
    count: int
    dtype: torch.dtype


class ShardReader:
    """Flat ranges of a checkpoint's tensors, whichever files hold them."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers. ValueError where a slice is not of full rows."""
        self._pieces: dict[str, list[StoredPiece]] = {}
        dtypes = {name: dtype for dtype, name in _NAMES.items()}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
            for name, entry in header.items():
                first_row, *rest = offsets[name]["saved_offsets"]
                if any(rest):
                    raise ValueError(f"{path.name} has a part of the rows of {name}")
                width, at = math.prod(entry["shape"][1:]), 8 + length + entry["data_offsets"][0]
                piece = StoredPiece(path, at, first_row * width, entry["shape"][0] * width, dtypes[entry["dtype"]])
                self._pieces.setdefault(name, []).append(piece)

    def read(self, name: str, first: int, count: int) -> torch.Tensor:
        """Values ``first`` to ``first + count`` of the full tensor, flat. KeyError; ValueError if incomplete."""
        pieces, done = self._pieces[name], 0
        found = torch.empty(count, dtype=pieces[0].dtype)
        memory, size = found.view(torch.uint8).numpy().data, found.element_size()
        for piece in pieces:
            begin, end = max(first, piece.first), min(first + count, piece.first + piece.count)
            if begin < end:
                with piece.path.open("rb") as file:
                    file.seek(piece.at + (begin - piece.first) * size)
                    done += file.readinto(memory[(begin - first) * size : (end - first) * size]) or 0
        if done != count * size:
            raise ValueError(f"the checkpoint has not all of {name}")
        return found


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
    """What this rank writes of ``tensors``. Each goes to the replica that has least so far, the same rule on all."""
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
