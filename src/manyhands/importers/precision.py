"""Dtypes named in other tools' files. float16 is not available: bfloat16 replaces it, with a note to the user."""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.importers.translation import Translator

NO_FLOAT16 = "float16 is not available: bfloat16"
DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "fp32": "float32",
    "float32": "float32",
}  # fmt: skip


def map_dtype(t: Translator, key: str, name: str) -> None:
    """``model.dtype`` from one of the names in ``DTYPES``."""
    if DTYPES[name] == "float16":
        t.substitute(key, {"model.dtype": "bfloat16"}, NO_FLOAT16)
    else:
        t.map(key, "model.dtype", DTYPES[name])


def map_fp16(t: Translator, key: str) -> None:
    """A key that switches float16 on."""
    if t.flag(key):
        map_dtype(t, key, "fp16")
    t.no_op(key)
