"""Matmuls of one Llama-8B block, alone: each projection by itself against q/k/v and gate/up as one matmul, at
sustained power.

    python benchmarks/matmuls.py --output benchmarks/results/h200-matmuls.jsonl

What LoRA needs of a frozen base is timed: ``x @ W.T`` forward and ``dy @ W`` backward. A case is repeated for
``--seconds`` after one second of the same work, so that clocks and power have settled; matmuls are enqueued without
waiting. Prints one JSON line a case:
TFLOP/s (2 M N K over the time by CUDA events), mean SM clock in MHz and power in W.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HIDDEN, KEY_VALUE, MLP = 4096, 1024, 14336
SEPARATE = {"q": HIDDEN, "k": KEY_VALUE, "v": KEY_VALUE, "gate": MLP, "up": MLP}
FUSED = {"qkv": HIDDEN + 2 * KEY_VALUE, "gate_up": 2 * MLP}
BLOCKS = 8  # distinct weights, more than the L2 cache holds, as in a model


class Power(threading.Thread):
    """Samples power and SM clock every 20 ms until stopped."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # NVML's indices ignore CUDA_VISIBLE_DEVICES
        self.nvml, self.gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.samples: list[tuple[float, float]] = []
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.02):
            watts = self.nvml.nvmlDeviceGetPowerUsage(self.gpu) / 1000
            self.samples.append((watts, self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM)))

    def stop(self) -> dict[str, float]:
        self.done.set()
        self.join()
        count = max(1, len(self.samples))
        return {
            "watts": round(sum(s[0] for s in self.samples) / count),
            "sm_mhz": round(sum(s[1] for s in self.samples) / count),
        }


def forward(x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], None]:
    """``x`` (tokens, in) by each weight (out, in)."""
    outputs = [torch.empty(len(x), len(w), device=x.device, dtype=x.dtype) for w in weights]

    def run() -> None:
        for w, y in zip(weights, outputs, strict=True):
            torch.mm(x, w.t(), out=y)

    return run


def backward(tokens: int, weights: list[torch.Tensor]) -> Callable[[], None]:
    """Gradient of the shared input: the first matmul writes, the others add to it."""
    device, dtype, width = weights[0].device, weights[0].dtype, weights[0].shape[1]
    gradients = [torch.randn(tokens, len(w), device=device, dtype=dtype) for w in weights]
    dx = torch.empty(tokens, width, device=device, dtype=dtype)

    def run() -> None:
        torch.mm(gradients[0], weights[0], out=dx)
        for dy, w in zip(gradients[1:], weights[1:], strict=True):
            dx.addmm_(dy, w)

    return run


def measure(
    name: str, runs: list[Callable[[], None]], flops: float, seconds: float, device: torch.device
) -> dict[str, Any]:
    """``flops`` of one pass over all ``runs``."""
    cuda = device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    def repeat(limit_s: float) -> tuple[int, float]:
        wait()
        start, passes = time.perf_counter(), 0
        while time.perf_counter() - start < limit_s:
            for run in runs:
                run()
            passes += 1
            if passes % 4 == 0:
                wait()
        wait()
        return passes, time.perf_counter() - start

    repeat(1.0 if cuda else 0.0)
    power = Power(device) if cuda else None
    if power:
        power.start()
    passes, elapsed = repeat(seconds)
    found = power.stop() if power else {}
    return {"case": name, "tflops": round(flops * passes / elapsed / 1e12, 1), "passes": passes} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--scale", type=int, default=1, help="divides all widths: 64 tries the script on a CPU")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype, hidden = torch.bfloat16, HIDDEN // options.scale
    torch.manual_seed(0)
    x = torch.randn(options.tokens, hidden, device=device, dtype=dtype)
    cases: list[tuple[str, list[str], bool]] = []
    for names in (["q"], ["k", "v"], ["gate", "up"], ["q", "k", "v"]):
        cases.append(("+".join(names), names, False))
    cases += [("qkv", ["qkv"], True), ("gate_up", ["gate_up"], True)]
    cases += [("q+k+v+gate+up", list(SEPARATE), False), ("qkv+gate_up", list(FUSED), True)]
    for name, names, fused in cases:
        widths = [(FUSED if fused else SEPARATE)[n] // options.scale for n in names]
        flops = 2.0 * options.tokens * hidden * sum(widths) * BLOCKS
        weights = [
            [torch.randn(n, hidden, device=device, dtype=dtype).mul_(0.02) for n in widths] for _ in range(BLOCKS)
        ]
        for direction in ("forward", "backward"):
            runs = [
                forward(x, block) if direction == "forward" else backward(options.tokens, block) for block in weights
            ]
            row = measure(f"{name} {direction}", runs, flops, options.seconds, device)
            row |= {
                "tokens": options.tokens,
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if device.index == 0 else "cpu",
            }
            print(json.dumps(row), flush=True)
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            del runs


if __name__ == "__main__":
    main()
