"""Times the grouped products of experts with their low-rank sums, at shapes of published mixtures.

    python -m benchmarks.grouped [--output rows.jsonl]

Random bfloat16 values, loads of a skewed router, rank 16. A case is one product of a block. ``apart`` is
``torch.nn.functional.grouped_mm``, in fp8 ``torch._scaled_grouped_mm``, and the sum added after it; ``together`` is
what a step runs, ``kernels.experts.triton``: one kernel where that takes less time. Prints one JSON line a case: the
median of 12 runs in ms, and the deviation of one from the other. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from manyhands.bench.rows import say
from manyhands.kernels.fp8.ops import multiply_groups, quantize_rows, transpose_stack
from manyhands.kernels.grouped import compute_groups

# groups, outputs, inputs, whether the product goes back to the inputs, rows
CASES = {
    "qwen30b-a3b down": (128, 2048, 768, False, 65_536),
    "qwen30b-a3b up, backward": (128, 1536, 2048, True, 65_536),
    "gptoss20b down": (32, 2880, 2880, False, 32_768),
    "gptoss20b up, backward": (32, 5760, 2880, True, 32_768),
    "mixtral8x7b down": (8, 4096, 14_336, False, 16_384),
    "mixtral8x7b up, backward": (8, 28_672, 4096, True, 16_384),
}
IN_FP8 = ("qwen30b-a3b down", "qwen30b-a3b up, backward", "mixtral8x7b down", "mixtral8x7b up, backward")
RANK, RUNS = 16, 12

Product = Callable[[], torch.Tensor]


def median_ms(run: Product) -> float:
    times = []
    for _ in range(RUNS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[RUNS // 2]


def draw_case(name: str, device: str) -> tuple[torch.Tensor, ...]:
    """x (n, k), weight (g, o, k), low (n, r), wide (g, r, o) and the ends of the groups."""
    groups, size, inner, back, num_rows = CASES[name]
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    loads = torch.multinomial(torch.softmax(0.5 * torch.randn(groups), 0), num_rows, replacement=True)
    ends = loads.bincount(minlength=groups).cumsum(0).int().to(device)
    x, weight = draw(num_rows, size if back else inner), 0.02 * draw(groups, size, inner)
    weight = weight.mT if back else weight
    return x, weight, draw(num_rows, RANK), 0.02 * draw(groups, RANK, weight.shape[1]), ends


def compare(name: str, apart: Product, together: Product, **fields: object) -> dict[str, object]:
    wanted, found = apart().float(), together().float()
    return {
        "case": name,
        **fields,
        "device": torch.cuda.get_device_name(),
        "apart_ms": round(median_ms(apart), 3),
        "together_ms": round(median_ms(together), 3),
        "deviation": float((found - wanted).norm() / wanted.norm()),
    }


def measure(name: str) -> dict[str, object]:
    from manyhands.kernels.experts import triton

    x, weight, low, wide, ends = draw_case(name, "cuda")

    def apart() -> torch.Tensor:
        y = compute_groups(x, weight, ends)
        triton.add_low(y, low, wide, ends)
        return y

    return compare(name, apart, lambda: triton.multiply_and_add(x, weight, low, wide, ends))


def measure_in_fp8(name: str) -> dict[str, object]:
    """Both with the values of the weight as they are multiplied; transposing them for the way back is timed alone."""
    from manyhands.kernels.experts import triton

    x, weight, low, wide, ends = draw_case(name, "cuda")
    values, scales = quantize_rows([x])
    stack, stack_scales = quantize_rows([weight.reshape(-1, weight.shape[2])])
    stack, stack_scales = stack.view(weight.shape), stack_scales.view(weight.shape[:2])

    def alone() -> torch.Tensor:
        return multiply_groups(values, scales, stack, stack_scales, ends, x.dtype)

    def apart() -> torch.Tensor:
        y = alone()
        triton.add_low(y, low, wide, ends)
        return y

    def together() -> torch.Tensor:
        return triton.multiply_rows_and_add(values, scales, stack, stack_scales, low, wide, ends, multiply_groups)

    times = {
        "product_ms": round(median_ms(alone), 3),
        "transpose_ms": round(median_ms(lambda: transpose_stack(stack)), 3),
    }
    return compare(f"{name}, fp8", apart, together, **times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSONL file to append the rows to")
    options = parser.parse_args()
    for name in CASES:
        say(measure(name), options.output)
    for name in IN_FP8:
        say(measure_in_fp8(name), options.output)


if __name__ == "__main__":
    main()
