"""Weights that bitsandbytes has stored in NF4: which of a folder's tensors belong together, and what they hold. Knows
no torch.

A weight NAME (o, i) is stored as NAME, two values a byte in a column of bytes (or of another dtype that holds them);
NAME.absmax, one for 64 values; NAME.quant_map, the 16 levels; NAME.quant_state.bitsandbytes__nf4, a JSON text as bytes;
and with double quantization NAME.nested_absmax, one for 256 of the first, and NAME.nested_quant_map
(bitsandbytes/functional.py, ``QuantState.as_dict``). Files are cut between any two of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.files import parse_json
from manyhands.core.limits import NF4_BLOCK_VALUES, NF4_ROW_BLOCKS
from manyhands.facts.safetensors import TensorHeader, read_bytes
from manyhands.facts.stored_mxfp4 import is_mxfp4

STATE = ".quant_state.bitsandbytes__nf4"
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class StoredNf4:
    """One weight (o, i) in NF4. ``dtype`` is what it had before, in the format's names; ``pieces`` are (file, tensor)
    by ``weight``, ``absmax``, ``quant_map``, and with double quantization ``nested_absmax`` and ``nested_quant_map``.
    """

    shape: tuple[int, int]
    dtype: str
    double_quant: bool
    offset: float  # added to the absolute maxima; 0 without double quantization
    pieces: Mapping[str, tuple[Path, str]]

    @property
    def header(self) -> TensorHeader:
        """Of the weight, as if it were not quantized."""
        return TensorHeader(self.dtype, self.shape)


Headers = Mapping[Path, Mapping[str, TensorHeader]]


def find_stored_nf4(headers: Headers) -> tuple[dict[str, StoredNf4], set[str]]:
    """NF4 weights by name, and the names of their tensors. UserError for an incomplete or unknown layout."""
    places = {name: (path, header) for path, own in headers.items() for name, header in own.items()}
    found: dict[str, StoredNf4] = {}
    names: set[str] = set()
    for state_name, (path, _) in places.items():
        if state_name.endswith(STATE):
            name = state_name.removesuffix(STATE)
            found[name] = _read(name, path, places)
            names |= {state_name, *(piece for _, piece in found[name].pieces.values())}
    return found, names


def _read(name: str, path: Path, places: Mapping[str, tuple[Path, TensorHeader]]) -> StoredNf4:
    try:
        state = parse_json(read_bytes(path, name + STATE))
        shape, nested = tuple(state["shape"]), "nested_blocksize" in state
        sizes = (state["quant_type"], state["blocksize"], state.get("nested_blocksize", NF4_ROW_BLOCKS))
        if sizes != ("nf4", NF4_BLOCK_VALUES, NF4_ROW_BLOCKS):
            raise ValueError(f"quant_type, blocksize and nested_blocksize are {sizes}, not nf4, 64 and 256")
        if len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"shape is {shape}")
        num_blocks = math.ceil(math.prod(shape) / NF4_BLOCK_VALUES)
        wanted = {"weight": math.ceil(math.prod(shape) / 2), "quant_map": 16 * 4}
        wanted |= {"absmax": num_blocks} if nested else {"absmax": 4 * num_blocks}
        if nested:
            wanted |= {"nested_absmax": 4 * math.ceil(num_blocks / NF4_ROW_BLOCKS), "nested_quant_map": 256 * 4}
        pieces = {kind: name if kind == "weight" else f"{name}.{kind}" for kind in wanted}
        wrong = [
            f"{pieces[kind]}: {'missing' if pieces[kind] not in places else places[pieces[kind]][1].num_bytes}, "
            f"not {num_bytes} bytes"
            for kind, num_bytes in wanted.items()
            if pieces[kind] not in places or places[pieces[kind]][1].num_bytes != num_bytes
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        return StoredNf4(
            shape=(shape[0], shape[1]),
            dtype=DTYPES[state["dtype"]],
            double_quant=nested,
            offset=float(state["nested_offset"]) if nested else 0.0,
            pieces={kind: (places[piece][0], piece) for kind, piece in pieces.items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the 4-bit weight {name} cannot be read",
            where=str(path),
            why=f"no {error}" if isinstance(error, KeyError) else str(error),
            fix="use the model's version that is not quantized, with method.name: qlora",
        ) from error


def refuse_other_quantization(config: Mapping[str, Any], path: Path) -> None:
    """UserError for a quantization_config of another kind than bitsandbytes' NF4 and MXFP4."""
    asked = config.get("quantization_config")
    if not asked or is_mxfp4(config):
        return
    method = str(asked.get("quant_method") or ("bitsandbytes" if asked.get("load_in_4bit") else "of an unnamed kind"))
    kind = str(asked.get("bnb_4bit_quant_type") or "")
    if method == "bitsandbytes" and asked.get("load_in_4bit") and kind == "nf4":
        return
    if method == "bitsandbytes":
        method += f" in {kind}" if asked.get("load_in_4bit") else " in 8 bits"
    raise UserError(
        f"the model's weights are quantized ({method}), which is not supported",
        where=str(path),
        why="its config.json has quantization_config; of quantized weights only bitsandbytes' NF4 and MXFP4 are read",
        fix="use the model's version that is not quantized; method.name: qlora quantizes it to NF4",
    )
