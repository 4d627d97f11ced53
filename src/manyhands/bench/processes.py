"""One measurement in processes of its own, so that one that hangs costs only itself. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any


def start_processes(
    module: str, arguments: list[str], world_size: int, limit_s: float
) -> tuple[str, dict[str, Any] | None]:
    """All that one process group wrote, and its result, if there is one. One that takes longer than ``limit_s`` is
    ended.
    """
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"] if world_size > 1 else []
    )
    command = [sys.executable, *launcher, "-m", module, *arguments]
    environment = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        return f"{end(process)}\nended after {limit_s} s", None
    except BaseException:
        end(process)
        raise
    found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    return output, found[-1] if found else None


def end(process: subprocess.Popen[str]) -> str:
    """End a launcher and its ranks, which would keep the device, and give what they wrote."""
    for how, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, None)):
        os.killpg(process.pid, how)
        try:
            return process.communicate(timeout=patience_s)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""


def count_gpus() -> int:
    from manyhands.facts.host import read_host_facts

    return len(read_host_facts().gpus)
