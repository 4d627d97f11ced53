"""What this machine's GPUs sustain, in less than a minute: matmuls by shape and dtype, attention, memory, copies to the
host, collectives.

    python -m manyhands.bench.calibrate              # one JSON line, and the file that plans read

``manyhands doctor --calibrate`` starts it. Each rate is that of a second's work after a shorter one, as the power limit
lets it; the same procedure gave the reference in ``planner/time/fitted.toml``, and plans use the ratio of the two.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from manyhands.bench.rows import count_gpus, start_processes
from manyhands.facts.gpu_kinds import save_calibration
from manyhands.kernels.fp8.select import has_scaled_mm

LIMIT_S = 120
WARM_S, TIMED_S = 0.4, 1.0
TOKENS = 8192
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # (out, in): queries, gate, down of an 8B model
SMALL = (1024, 2048, 2048)  # tokens, out, in: fewer tiles than multiprocessors
COPIED_BYTES, GATHERED_BYTES = 2**30, 2**28


def main() -> int:
    if "RANK" in os.environ:
        return measure_links()
    if not torch.cuda.is_available():
        print("error: there is no GPU to calibrate")
        return 1
    rates, num_gpus = measure_one(), count_gpus()
    if num_gpus > 1:
        output, found = start_processes("manyhands.bench.calibrate", [], num_gpus, LIMIT_S)
        if found is None:
            last = (output.strip().splitlines() or ["it wrote nothing"])[-1]
            print(f"note: collectives could not be measured: {last}", file=sys.stderr)
        rates |= found or {}
    save_calibration(torch.cuda.get_device_name(), num_gpus, rates)
    print("RESULT " + json.dumps(rates | {"device": torch.cuda.get_device_name(), "gpus": num_gpus}), flush=True)
    return 0


def measure_one() -> dict[str, float]:
    """Rates of the first GPU, in TFLOP/s and GB/s, and microseconds of a launch."""
    device = torch.device("cuda", 0)
    rates = {
        "matmul_tflops": harmonic_mean([matmul_tflops(device, TOKENS, out, into) for out, into in SHAPES]),
        "small_matmul_tflops": matmul_tflops(device, *SMALL),
        "attention_tflops": attention_tflops(device),
        "memory_gb_s": memory_gb_s(device),
        "pcie_gb_s": pcie_gb_s(device),
        "launch_us": launch_us(device),
    }
    if has_scaled_mm(device):
        rates["fp8_tflops"] = harmonic_mean([fp8_tflops(device, TOKENS, out, into) for out, into in SHAPES])
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}


def seconds(work: Callable[[], Any]) -> float:
    """Of one call, over a second of calls after some that are not counted."""
    for duration in (WARM_S, TIMED_S):
        torch.cuda.synchronize()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < duration:
            for _ in range(4):
                work()
            count += 4
            torch.cuda.synchronize()
        took = (time.perf_counter() - begin) / count
    return took


def harmonic_mean(rates: list[float]) -> float:
    return len(rates) / sum(1 / rate for rate in rates)


def matmul_tflops(device: torch.device, tokens: int, out: int, into: int) -> float:
    x = torch.randn(tokens, into, device=device, dtype=torch.bfloat16)
    weight = torch.randn(out, into, device=device, dtype=torch.bfloat16)
    result = x.new_empty(tokens, out)
    return 2 * tokens * out * into / seconds(lambda: torch.matmul(x, weight.T, out=result)) / 1e12


def fp8_tflops(device: torch.device, tokens: int, out: int, into: int) -> float:
    x = torch.randn(tokens, into, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(out, into, device=device).to(torch.float8_e4m3fn)
    rows, columns = torch.ones(tokens, 1, device=device), torch.ones(1, out, device=device)

    def work() -> Any:
        return torch._scaled_mm(x, weight.T, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16)

    return 2 * tokens * out * into / seconds(work) / 1e12


def attention_tflops(device: torch.device) -> float:
    """Causal, forward and backward, 2 samples of 4,096 tokens, 32 heads of 128: ``14 pairs q`` operations."""
    shape = (2, 32, TOKENS // 2, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def work() -> None:
        torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    pairs = 2 * (TOKENS // 2) ** 2 / 2
    return 14 * pairs * 32 * 128 / seconds(work) / 1e12


def memory_gb_s(device: torch.device) -> float:
    source = torch.empty(COPIED_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds(lambda: target.copy_(source)) / 1e9


def pcie_gb_s(device: torch.device) -> float:
    source = torch.empty(GATHERED_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty(GATHERED_BYTES, dtype=torch.uint8, pin_memory=True)
    return GATHERED_BYTES / seconds(lambda: target.copy_(source, non_blocking=True)) / 1e9


def launch_us(device: torch.device) -> float:
    """The host's time to launch a small kernel."""
    x = torch.zeros(8, device=device)

    def work() -> None:
        for _ in range(100):
            x.add_(1)

    return seconds(work) / 100 * 1e6


def measure_links() -> int:
    """On every rank: bytes/s that each one receives in a gather of large buffers."""
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mine = torch.empty(GATHERED_BYTES, device=device, dtype=torch.uint8)
    all_of_it = torch.empty(GATHERED_BYTES * world_size, device=device, dtype=torch.uint8)
    for count in (5, 20):  # the first are not counted; every rank makes as many
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            dist.all_gather_into_tensor(all_of_it, mine)
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) / count
    if rank == 0:
        rate = GATHERED_BYTES * (world_size - 1) / took / 1e9
        print("RESULT " + json.dumps({"link_gb_s": float(f"{rate:.4g}")}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
