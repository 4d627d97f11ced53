"""NEFTune (Jain et al. 2023, https://arxiv.org/abs/2310.05914): uniform noise on the input embeddings while training.

As in transformers and TRL its magnitude is alpha / sqrt(T D), for T tokens of D dimensions; here T is the length of
the document itself, so that neither padding nor what is packed with it changes its noise. The noise is a function of
(seed, epoch, step, sample, position, dimension): the same in every layout and after a resume. It is mixed in integers,
chunk by chunk, without a generator. None in evaluation, nor where a batch says no step.

Shapes: b rows, t positions, n tokens, e hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from manyhands.convert.protocol import BaseConverter
from manyhands.model.documents import Documents
from manyhands.model.loss import LossModel

CHUNK = 2**22  # values mixed at once, of 8 bytes each
WORD = 2**32 - 1
COLUMN = 0x9E3779B1  # a prime near 2**32 divided by the golden ratio


class Neftune(BaseConverter):
    """Noise on the input embeddings."""

    def on_loss(self, loss_model: LossModel) -> None:
        loss_model.needs_documents = True
        noise = Noise(self.context.method.neftune_alpha, loss_model.documents)
        loss_model.model.get_input_embeddings().register_forward_hook(noise.add)

    def describe(self) -> Sequence[str]:
        return (f"NEFTune: noise of {self.context.method.neftune_alpha:g} / sqrt(tokens x dimensions) on embeddings",)


class Noise:
    """A forward hook of the input embeddings."""

    def __init__(self, alpha: float, documents: Documents) -> None:
        self.alpha, self.documents = alpha, documents

    def add(self, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Vectors (b, t, e) and their noise. Other calls (of one token, for a check) are left alone."""
        lengths, samples, key = self.documents.lengths, self.documents.samples, self.documents.noise_key
        if not module.training or key is None or lengths is None or samples is None:
            return output
        if output.shape[:-1] != lengths.shape:
            return output
        positions = self.documents.positions
        assert positions is not None
        with torch.no_grad():
            tokens = mix_tokens(key, samples.flatten(), positions.flatten())
            scales = self.alpha / (lengths.flatten().clamp(min=1) * output.shape[-1]).double().sqrt()
            noise = uniform_noise(tokens, output.shape[-1], scales.float(), output.dtype)
        return output + noise.view_as(output)


def uniform_noise(tokens: torch.Tensor, num_columns: int, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(n, e) in ``dtype``, uniform in +- ``scales`` (n) float32, from ``tokens`` (n) int64 of 32 bits."""
    columns = torch.arange(num_columns, device=tokens.device) * COLUMN & WORD
    num_rows = max(1, CHUNK // num_columns)
    parts = [
        _to_uniform(_mix(keys[:, None] ^ columns)).mul_(scale[:, None]).to(dtype)
        for keys, scale in zip(tokens.split(num_rows), scales.split(num_rows), strict=True)
    ]
    return torch.cat(parts)


def mix_tokens(key: int, samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """32 bits of each token, int64 (n), from the step's ``key`` of 64 bits, its sample and its place in this."""
    mixed = _mix(samples & WORD ^ key & WORD)
    mixed = _mix(mixed ^ samples >> 32 ^ key >> 32 & WORD)
    return _mix(mixed ^ positions * COLUMN & WORD)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32 bits in int64 (C. Wellons' two-round hash, https://github.com/skeeto/hash-prospector): both
    factors are below 2**31, so that no product overflows."""
    x = x ^ x >> 16
    x = x * 0x21F0AAAD & WORD
    x = x ^ x >> 15
    x = x * 0x735A2D97 & WORD
    return x ^ x >> 15


def _to_uniform(x: torch.Tensor) -> torch.Tensor:
    """float32 in (-1, 1), symmetric around 0, exact in every device's arithmetic, from the upper 23 of 32 bits."""
    return ((x >> 9) * 2 + 1 - 2**23).to(torch.float32).mul_(math.ldexp(1, -23))
