"""Which GPUs the user's variables leave visible, as CUDA, ROCm's runtime and HIP read them; and NVIDIA's library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manyhands.core.errors import UserError

AMD_VARIABLES = ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """NVIDIA's management library, started. Raises its NVMLError where there is no driver."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def select_visible(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Indices into ``uuids`` that a list such as ``CUDA_VISIBLE_DEVICES=visible`` leaves, in its order.

    As CUDA reads it: indices or (the start of) UUIDs; everything from the first entry that names no GPU on is ignored.
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            hits = [int(entry)] if int(entry) < len(uuids) else []
        else:
            hits = [index for index, uuid in enumerate(uuids) if entry and uuid.lower().startswith(entry.lower())]
        if len(hits) != 1 or hits[0] in chosen:
            break
        chosen += hits
    return chosen


def select_amd(environ: Mapping[str, str], uuids: Sequence[str]) -> list[int]:
    """Indices into ``uuids``, in HIP's order, of what the variables leave.

    ROCR_VISIBLE_DEVICES is applied first, by the runtime; HIP renumbers what it leaves, and applies
    GPU_DEVICE_ORDINAL and then HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is not set. UserError where
    torch and HIP would read them differently, or where one names GPUs that an earlier one took away.
    """
    rocr, hip, cuda = (environ.get(f"{name}_VISIBLE_DEVICES") for name in ("ROCR", "HIP", "CUDA"))
    where = ", ".join(f"{name}={environ[name]}" for name in AMD_VARIABLES if name in environ)
    if hip is not None and cuda is not None and _entries(hip) != _entries(cuda):
        raise UserError(
            "HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES name different GPUs",
            where=where,
            why="HIP reads the first and other programs the second",
            fix="unset CUDA_VISIBLE_DEVICES, or give both the same value",
        )
    if rocr is not None and hip is None and cuda is not None:
        raise UserError(
            "ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES are both set",
            where=where,
            why="torch counts GPUs by the first alone, HIP then hides some of them by the second",
            fix="unset one of them, or write HIP_VISIBLE_DEVICES in place of CUDA_VISIBLE_DEVICES",
        )
    chosen = list(range(len(uuids)))
    for name in AMD_VARIABLES:  # in the order in which they are applied
        if name not in environ or (name == "CUDA_VISIBLE_DEVICES" and hip is not None):
            continue
        left = select_visible(environ[name], [uuids[index] for index in chosen])
        beyond = [entry for entry in _entries(environ[name]) if entry.isdecimal() and int(entry) >= len(chosen)]
        if beyond and name != "ROCR_VISIBLE_DEVICES" and len(chosen) < len(uuids):
            raise UserError(
                f"{name} names GPU {beyond[0]}, but only {len(chosen)} are left by then",
                where=where,
                why=f"what an earlier variable leaves is renumbered, here from 0 to {len(chosen) - 1}",
                fix="unset one of them, or count from 0 again in the second",
            )
        chosen = [chosen[index] for index in left]
    return chosen


def hides_all(environ: Mapping[str, str], variables: Sequence[str]) -> bool:
    """Whether the user asks for no GPU at all: an empty list, or one that begins with -1 or a word for none."""
    first = [_entries(environ[name])[:1] for name in variables if name in environ]
    return any(not entry or entry[0].lower() in ("-1", "none", "void", "nodevfiles") for entry in first)


def _entries(visible: str) -> list[str]:
    return [entry.strip() for entry in visible.split(",") if entry.strip()]
