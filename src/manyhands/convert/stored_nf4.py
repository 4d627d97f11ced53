"""Weights that bitsandbytes has stored in NF4, taken over without quantizing again: the same bytes in rows that shard.

A row of ours (``convert/nf4.py``) is 256 blocks, as many as bitsandbytes quantizes the scales of together, so rows hold
what the files hold, byte for byte, for any sharding. Weights are dequantized straight to the dtype that the model
computes in; bitsandbytes rounds them to the dtype that they had before first, which is another number only where that
is another dtype.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.holding import local, local_slices
from manyhands.facts.stored_nf4 import StoredNf4
from manyhands.kernels.nf4.reference import CODE_BYTES, ROW_BLOCKS, dynamic_code, levels
from manyhands.model.load import loaded_tensors
from manyhands.model.source import open_weights, read_checkpoint
from manyhands.model.structure import block_linears

# Of a piece: bytes, float32 scales, or whatever dtype the bytes are stored as.
DTYPES = {"U8": torch.uint8, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def find_quantized(model: nn.Module, folder: str) -> set[str]:
    """Names of the linear layers of the blocks whose weights ``folder`` holds in NF4. UserError for other such weights:
    of a head, say.
    """
    checkpoint = read_checkpoint(model, loaded_tensors(model), folder)
    found = {
        name.removesuffix(".weight")
        for name, stored in checkpoint.plain.items()
        if isinstance(stored.quantized, StoredNf4)
    }
    if mixed := [part.name for rule in checkpoint.conversions for part in rule.parts if part.quantized is not None]:
        raise UserError(
            "weights that are stored in NF4 would have to be put together in another way",
            where=folder,
            why="transformers stacks or cuts these weights as it loads them, which 4-bit weights do not allow",
            fix="use the model's version that is not quantized, with method.name: qlora",
            details=sorted(mixed)[:20],
        )
    if others := sorted(found - block_linears(model).keys()):
        raise UserError(
            "weights outside of the blocks are stored in NF4",
            where=folder,
            why="only linear layers of the blocks are kept in 4 bits",
            fix="use the model's version that is not quantized, with method.name: qlora",
            details=others[:20],
        )
    return found


@torch.no_grad()
def take_stored(stored: StoredNf4, codes: nn.Parameter, statistics: nn.Parameter) -> None:
    """Fill this rank's rows of codes and statistics with the bytes of the files."""
    rows, own_codes, own_statistics = local_slices(codes)[0], local(codes), local(statistics)
    own_codes.zero_()  # what pads the last row
    own_statistics.zero_()
    with ExitStack() as stack:
        files = {path: stack.enter_context(open_weights(path)) for path, _ in stored.pieces.values()}

        def read(kind: str, begin: int | None = None, end: int | None = None) -> torch.Tensor:
            """A piece as flat bytes, or those from ``begin`` to ``end``, each a multiple of its elements."""
            path, name = stored.pieces[kind]
            part: Any = files[path].get_slice(name)
            width = torch.empty(0, dtype=DTYPES[part.get_dtype()]).element_size()
            cut = part[:] if begin is None or end is None else part[begin // width : end // width]
            return cut.contiguous().view(-1).view(torch.uint8)

        _check_map(read("quant_map"), levels(torch.device("cpu")), stored)
        packed = read("weight", rows.start * CODE_BYTES, rows.stop * CODE_BYTES)
        own_codes.view(torch.uint8).view(-1)[: len(packed)] = packed.to(own_codes.device)
        bytes_of_rows = own_statistics.view(torch.uint8)
        scale_bytes = ROW_BLOCKS if stored.double_quant else 4 * ROW_BLOCKS
        absmax = read("absmax", rows.start * scale_bytes, rows.stop * scale_bytes)
        padded = torch.zeros(len(own_codes) * scale_bytes, dtype=torch.uint8)
        padded[: len(absmax)] = absmax
        bytes_of_rows[:, :scale_bytes] = padded.view(-1, scale_bytes).to(bytes_of_rows.device)
        if stored.double_quant and len(own_codes):
            _check_map(read("nested_quant_map"), dynamic_code(torch.device("cpu")), stored)
            scales = read("nested_absmax", rows.start * 4, rows.stop * 4).view(torch.float32)
            second = torch.stack([scales, torch.full_like(scales, stored.offset)], dim=1).view(torch.uint8)
            bytes_of_rows[:, ROW_BLOCKS:] = second.to(bytes_of_rows.device)


def _check_map(found: torch.Tensor, expected: torch.Tensor, stored: StoredNf4) -> None:
    if not torch.equal(found.view(torch.float32), expected):
        path, name = stored.pieces["weight"]
        raise UserError(
            f"the 4-bit weight {name} has other levels than NF4",
            where=str(path),
            fix="use the model's version that is not quantized, with method.name: qlora",
        )
