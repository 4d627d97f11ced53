"""Weights of experts that are stored in MXFP4, as gpt-oss's: which of a folder's tensors belong together. Knows no
torch.

A weight NAME of g experts, (g, i, o) as transformers has it, is stored as NAME_blocks (g, o, i / 32, 16), two values a
byte, and NAME_scales (g, o, i / 32), one for 32 values along i, both of bytes (transformers, integrations/mxfp4.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.limits import MXFP4_BLOCK_VALUES
from manyhands.facts.safetensors import TensorHeader

BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class StoredMxfp4:
    """The weights (g, i, o) of g experts in MXFP4; ``pieces`` are (file, tensor) by ``blocks`` and ``scales``."""

    shape: tuple[int, int, int]
    pieces: Mapping[str, tuple[Path, str]]
    dtype: str = "BF16"  # which transformers makes of them

    @property
    def header(self) -> TensorHeader:
        """Of the weights, as if they were not quantized."""
        return TensorHeader(self.dtype, self.shape)


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its experts are in MXFP4."""
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def find_stored_mxfp4(
    headers: Mapping[Path, Mapping[str, TensorHeader]],
) -> tuple[dict[str, StoredMxfp4], set[str]]:
    """MXFP4 weights by name, and the names of all tensors that hold them. UserError for an incomplete one."""
    places = {name: (path, header) for path, own in headers.items() for name, header in own.items()}
    found: dict[str, StoredMxfp4] = {}
    names: set[str] = set()
    for blocks_name, (path, blocks) in places.items():
        if not blocks_name.endswith(BLOCKS) or blocks.dtype != "U8":
            continue
        name = blocks_name.removesuffix(BLOCKS)
        scales_path, scales = places.get(name + SCALES, (path, None))
        if len(blocks.shape) != 4 or scales is None or (scales.dtype, *scales.shape) != ("U8", *blocks.shape[:3]):
            raise UserError(
                f"the MXFP4 weight {name} cannot be read",
                where=str(path),
                why=f"{name}{SCALES} is {'missing' if scales is None else scales.shape}, beside blocks {blocks.shape}",
                fix="download the model again",
            )
        groups, size, num_scales, _ = blocks.shape
        pieces = {"blocks": (path, blocks_name), "scales": (scales_path, name + SCALES)}
        found[name] = StoredMxfp4((groups, num_scales * MXFP4_BLOCK_VALUES, size), pieces)
        names |= {blocks_name, name + SCALES}
    return found, names
