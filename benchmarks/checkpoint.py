"""How long a checkpoint holds training up: written while it waits, and beside it.

``python -m benchmarks.checkpoint --gib 1`` saves float32 weights with AdamW's states, --gib in all, four times each way
into --folder; on a GPU (``--device cuda``) matmuls keep the device busy meanwhile, as a step would. Rows of JSON: the
median seconds that the thread of the training could not go on, the first save's, and the median until it exists.
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

SAVES = 4
WIDTH = 4096


def build(gib: float, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    rows = max(1, int(gib * 2**30 / 12 / WIDTH / 8))
    model = nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False, device=device) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def work(device: torch.device, square: torch.Tensor, num: int) -> None:
    for _ in range(num if device.type == "cuda" else 0):
        torch.mm(square, square, out=square)


def measure(gib: float, device: torch.device, folder: Path) -> list[dict[str, object]]:
    model, optimizer = build(gib, device)
    square = torch.zeros(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
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
        work(device, square, 400)  # a forward and backward pass
        if device.type == "cuda":
            torch.cuda.synchronize()
        end = time.monotonic()
        before_update()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # what the copies hold the update up for
            stall += time.monotonic() - end
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
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one otherwise")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for row in measure(asked.gib, torch.device(asked.device), Path(folder)):
            print(json.dumps({"gib": asked.gib, "device": asked.device} | row))


if __name__ == "__main__":
    main()
