"""Frozen experts in MXFP4, as gpt-oss is published: the bytes of the files, dequantized a stack at a time for each
product.

Rows of codes and of scales are held (``kernels/mxfp4/reference.py``), VIEWED AS THE COMPUTE DTYPE as NF4's are, and
for the same reason; a shard of rows holds complete blocks. Knows nothing of adapters and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from manyhands.convert.grouped import hold
from manyhands.convert.packed import PackedLinear
from manyhands.convert.protocol import BaseConverter
from manyhands.core.holding import local, local_slices
from manyhands.core.limits import MXFP4_BLOCK_VALUES
from manyhands.core.progress import advance
from manyhands.facts.stored_mxfp4 import StoredMxfp4
from manyhands.kernels.mxfp4.reference import CHUNK_VALUES, count_bytes, quantize
from manyhands.kernels.mxfp4.select import choose_backend, dequantize, describe
from manyhands.model.load import loaded_tensors
from manyhands.model.source import open_weights, read_checkpoint
from manyhands.model.structure import block_linears
from manyhands.model.weights import Storage, stacked_layers


class Mxfp4Linear(PackedLinear):
    """A frozen linear layer without a bias whose weight is in MXFP4. Empty until ``fill``.

    ``weight`` is no parameter here but the dequantized weight, computed at each access.
    """

    storage: Storage = "mxfp4"
    weight_pieces = ("weight_codes", "weight_scales")  # model.weights.QuantizedLayer
    weight_codes: nn.Parameter
    weight_scales: nn.Parameter

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        dtype, device = base.weight.dtype, base.weight.device
        for name, num_bytes in zip(self.weight_pieces, count_bytes(base.in_features), strict=True):
            empty = torch.empty(base.out_features, num_bytes // dtype.itemsize, dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", None)

    @staticmethod
    def dequantize(pieces: Sequence[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return dequantize(pieces[0], pieces[1], shape, dtype)

    @torch.no_grad()
    def fill(self, weight: Any) -> None:
        """Take the bytes of a ``StoredMxfp4``, or quantize ``weight`` (o, i); each rank what its own rows need."""
        codes, scales = (local(x).view(torch.uint8) for x in (self.weight_codes, self.weight_scales))
        scales.zero_()  # what fills a row up
        if isinstance(weight, StoredMxfp4):
            self._take(weight, codes, scales)
            return
        rows, step = local_slices(self.weight_codes)[0], max(1, CHUNK_VALUES // self.in_features)
        for begin in range(rows.start, rows.stop, step):
            part = weight[begin : min(begin + step, rows.stop)].to(codes.device)
            own = slice(begin - rows.start, begin - rows.start + len(part))
            codes[own], scales[own, : self.in_features // MXFP4_BLOCK_VALUES] = quantize(part)

    def _take(self, stored: StoredMxfp4, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """This rank's rows, an expert at a time."""
        rows, size = local_slices(self.weight_codes)[0], stored.shape[2]
        with ExitStack() as stack:
            files = {path: stack.enter_context(open_weights(path)) for path, _ in stored.pieces.values()}
            blocks_of, scales_of = (
                files[path].get_slice(name) for path, name in (stored.pieces[kind] for kind in ("blocks", "scales"))
            )
            begin = rows.start
            while begin < rows.stop:
                expert, first = divmod(begin, size)
                last = min(size, first + rows.stop - begin)
                own = slice(begin - rows.start, begin - rows.start + last - first)
                one = slice(expert, expert + 1)
                codes[own] = blocks_of[one, first:last].flatten(0, 1).flatten(1).to(codes.device)
                found = scales_of[one, first:last].flatten(0, 1)
                scales[own, : found.shape[1]] = found.to(scales.device)
                begin += last - first
                advance()


class Mxfp4Experts(BaseConverter):
    """The stacks that the model's files have in MXFP4, or all of them where its weights are new."""

    def on_meta(self, model: Any) -> None:
        context = self.context
        names = list(stacked_layers(model))
        if context.config.model.init == "pretrained":
            plain = read_checkpoint(model, loaded_tensors(model), context.plan.model_folder).plain
            names = [name for name in names if isinstance(plain[name].quantized, StoredMxfp4)]
        linears = block_linears(model)
        for name in names:
            model.set_submodule(name, hold(linears[name], Mxfp4Linear))
        backend = choose_backend(context.device, context.dtype)
        self.lines.append(f"mxfp4: {len(names)} stacks kept as they are stored, dequantized by {describe(backend)}")
