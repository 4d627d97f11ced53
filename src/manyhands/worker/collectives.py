"""What torch knows of the collectives that this rank has entered: how many, and the last ones in its flight recorder.

None of it is public: torch counts for its own debugging tools. Where a version lacks something, there is less to tell.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from manyhands.launch.diagnose.stacks import MAX_COLLECTIVES

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo and others; of NCCL


def count_collectives() -> int:
    """Collectives that this rank has entered, over all its groups; 0 where this torch does not count them.

    All ranks enter the same ones in the same order, so a rank that waits in one has entered more than the rank it waits
    for. Torch counts for its own debugging tools only: none of this is public.
    """
    try:
        backends: dict[int, Any] = {}
        for group in list(dist.distributed_c10d._world.pg_map):
            for device in group._device_types:
                backend = group._get_backend(device)
                backends[id(backend)] = backend
        return sum(backend._get_sequence_number_for_group() for backend in backends.values())
    except Exception:  # whatever a version of torch may lack: then stages and steps alone tell how far a rank has come
        return 0


def read_collectives() -> list[dict[str, Any]]:
    """The last collectives of all groups and the oldest unfinished ones, as ``stacks.Collective``. Thread-safe."""
    entries = [entry for recorder in _RECORDERS for entry in _dump(recorder)]
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    found = [_describe(entry) for entry in entries]
    pending = [one for one in found[:-MAX_COLLECTIVES] if not one["done"]]
    return [*pending[:MAX_COLLECTIVES], *found[-MAX_COLLECTIVES:]]


def _dump(recorder: str) -> list[dict[str, Any]]:
    """A recorder's entries. The pickled form is never read."""
    try:
        dump = getattr(torch._C._distributed_c10d, recorder)
        return list(json.loads(dump()).get("entries", ()))
    except Exception:  # whatever a version of torch may lack
        return []


def _describe(entry: dict[str, Any]) -> dict[str, Any]:
    group = entry.get("process_group") or ["", ""]
    return {
        "name": str(entry.get("profiling_name", "?")).rpartition(":")[2],
        "group": str(group[1] or group[0]),
        "number": int(entry.get("collective_seq_id", 0)),
        "sizes": str(entry.get("input_sizes", "")),
        "done": bool(entry.get("retired")) or entry.get("state") == "completed",
        "started": entry.get("state") != "scheduled" or "gloo" in str(entry.get("profiling_name")),  # gloo says none
    }
