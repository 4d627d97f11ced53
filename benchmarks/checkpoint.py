"""How long a checkpoint holds training up: written while it waits, and beside it.

``python -m benchmarks.checkpoint --gib 1`` saves float32 weights with AdamW's states, --gib in all, four times each way
into --folder; matmuls keep the device busy meanwhile, as a step would. ``--offload`` has the states of a GPU's weights
in host memory. Rows of JSON: the median seconds that the thread of the training could not go on, the first save's, and
the median until it exists.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from manyhands.checkpoint import save_checkpoint
from manyhands.checkpoint.background import BackgroundSaver
from manyhands.checkpoint.tensors import checkpoint_tensors
from manyhands.engine.optimizers import StreamedOptimizer

SAVES = 4
WIDTH = 4096


def build(gib: float, device: torch.device, offload: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    rows = max(1, int(gib * 2**30 / 12 / WIDTH / 8))
    model = nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False, device=device) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if offload:
        optimizer = StreamedOptimizer(optimizer, device)
    optimizer.step()
    return model, optimizer


def work(square: torch.Tensor) -> None:
    """About a second of an H200, and of a core of a CPU."""
    for _ in range(400 if square.is_cuda else 1):
        torch.mm(square, square, out=square)


def measure(gib: float, device: torch.device, folder: Path, offload: bool) -> list[dict[str, object]]:
    model, optimizer = build(gib, device, offload)
    width, dtype = (WIDTH, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    square = torch.zeros(width, width, device=device, dtype=dtype)
    rows: list[dict[str, object]] = []
    stalls, totals = [], []
    for number in range(SAVES):
        begin = time.monotonic()
        save_checkpoint(folder / f"step-{number:06d}", model, optimizer, {}, rank=0, world_size=1)
        stalls.append(time.monotonic() - begin)
        shutil.rmtree(folder / f"step-{number:06d}")
    rows.append({"how": "waits", "stall_s": statistics.median(stalls), "first_s": stalls[0], "exists_s": None})
    saver, stalls = BackgroundSaver(0, 1, device), []
    tensors = checkpoint_tensors(model, optimizer)
    assert saver.reserve(tensors) == ""  # beside the first steps of a run
    for number in range(SAVES):
        begin = time.monotonic()
        save, before_update = saver.save(folder / f"beside-{number:06d}", tensors, {}, manifest_extra={})
        stall = time.monotonic() - begin
        work(square)  # a forward and backward pass
        if device.type == "cuda":
            torch.cuda.synchronize()
        end = time.monotonic()
        before_update()
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # what the copies hold the update up for
        stall += time.monotonic() - end
        optimizer.step()
        save.wait_ended()
        stalls.append(stall)
        totals.append(time.monotonic() - begin)
        shutil.rmtree(folder / f"beside-{number:06d}")
    saver.close()
    beside = {"how": "beside", "stall_s": statistics.median(stalls), "first_s": stalls[0]}
    rows.append(beside | {"exists_s": statistics.median(totals)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of a checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--offload", action="store_true", help="optimizer states lie in host memory")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one otherwise")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for row in measure(asked.gib, torch.device(asked.device), Path(folder), asked.offload):
            print(json.dumps({"gib": asked.gib, "device": asked.device, "offload": asked.offload} | row))


if __name__ == "__main__":
    main()
