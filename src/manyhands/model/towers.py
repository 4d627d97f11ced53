"""What vision towers whose images lie end to end compute otherwise than in transformers: attention, and the embedding
of their patches.

In attention each image is seen by itself alone, in both directions. Such towers of transformers cut their patches at
cumulative lengths. They do so by ``Tensor.tolist`` in every layer, for which the host waits each time, unless the name
of their attention has ``flash`` in it: then that is called once with the lengths. ``manyhands_flash_tower`` is such a
name. On CUDA in half precision torch's kernel for packed documents computes it, or cuDNN where all images have one
size; else, and as the reference, each image does by itself.

Shapes: n patches of all images, h heads, d dimensions a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from manyhands.model.structure import with_class

TOWER = "manyhands_flash_tower"
HALF = (torch.bfloat16, torch.float16)
DENSE = 256  # patches of an image, or of a window of it, from which images of one size are computed as rows
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def use_varlen(tower: nn.Module) -> None:
    """Let the attention of ``tower``, a transformers model, be ours: by its configuration, which every layer reads.

    Not by ``set_attn_implementation``, which for such a name looks for a package that has it.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(TOWER, attend_tower)
    for module in tower.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = TOWER


@torch.compiler.disable  # which kernel it takes depends on the number and sizes of images: a graph for each otherwise
def attend_tower(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool = False,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Three of (1, h, n, d) -> (1, n, h, d). ``cu_seq_lens_q``: where images begin, and n; no image has more than
    ``max_length_q`` patches. Raises ``RuntimeError`` where an argument would be ignored or lengths did not arrive.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise RuntimeError(f"{TOWER} got no cumulative lengths from {type(module).__name__}")
    if attention_mask is not None or dropout or is_causal:
        raise RuntimeError(f"{TOWER} has neither masks nor dropout, and is not causal (dropout={dropout})")
    if query.device.type == "cpu" or query.dtype not in HALF:
        return attend_each(query, key, value, cu_seq_lens_q, scaling), None
    if (
        (num_images := len(cu_seq_lens_q) - 1) > 1
        and max_length_q >= DENSE
        and num_images * max_length_q == query.shape[2]
    ):
        return attend_alike(query, key, value, num_images, scaling), None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (n, h, d)
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    out: Any = varlen_attn(query, key, value, *bounds, scale=scaling, window_size=(-1, -1))
    return out[None], None


def attend_alike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_images: int, scaling: float | None
) -> torch.Tensor:
    """The same, of images that all have as many patches: by cuDNN where it can. An H200 takes 1.15 ms so for 8 images
    of 4,096 patches and 16 heads of 64 dimensions, and 1.78 by varlen.
    """
    rows = [x[0].unflatten(1, (num_images, -1)).transpose(0, 1) for x in (query, key, value)]  # (images, h, n, d)
    with sdpa_kernel(BACKENDS, set_priority=True):
        out = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)[None]


def attend_each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """The same, one image after the other."""
    lengths = cu_seq_lens.diff().tolist()
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    each = [F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in parts]
    return torch.cat(each, dim=2).transpose(1, 2)


class PatchConvolution(nn.Conv3d):
    """Over patches as large as its kernel, which is a matmul: on a GPU computed as one, as cuDNN's convolution takes an
    H200 5.9 ms for 32,768 patches of 16 x 16 pixels.
    """

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(n, channels, T, H, W) -> (n, out, 1, 1, 1) where T, H and W are the kernel's."""
        is_matmul = tuple(patches.shape[2:]) == self.kernel_size and not any(self.padding) and self.groups == 1
        if patches.device.type == "cpu" or not is_matmul:
            return super().forward(patches)
        return multiply_patches(patches, self.weight, self.bias)


def multiply_patches(patches: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(n, channels, T, H, W), (out, channels, T, H, W) -> (n, out, 1, 1, 1)"""
    return F.linear(patches.flatten(1), weight.flatten(1), bias)[..., None, None, None]


def embed_by_matmul(tower: nn.Module) -> None:
    """Let the convolution of ``tower`` over patches be a ``PatchConvolution``; parameters and names stay."""
    for name, module in list(tower.named_modules()):
        if type(module) is nn.Conv3d:
            tower.set_submodule(name, with_class(module, PatchConvolution))
