"""Times the dequantization of NF4 weights with double quantization on one GPU: by bitsandbytes and by one Triton
launch.

    python benchmarks/nf4.py [--output rows.jsonl] [--seconds 30] [--only 14336x4096]

The weights of a block of Llama-8B, in bfloat16, as many of one shape as make 2**28 values, so that nothing is read from
the L2 cache and nothing overwritten in it. Prints one JSON line a case: ``ms`` a weight of a captured graph, which no
launch delays; ``eager_ms`` as called one after the other; ``gb_s`` of the bytes that must be read and written, 0.516
and 2 a value; its share of what copying reaches on this GPU; values whose bits are not those of bitsandbytes. Then a
line for each way with the sum over all of the model's weights. A case that fails says so in its line; those that no
longer fit into ``--seconds`` are listed as open.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from manyhands.bench import rows as records
from manyhands.kernels.nf4 import reference, select
from manyhands.kernels.nf4.triton import dequantize_triton

Shape = tuple[int, int]
NUM_LAYERS = 32
SHAPES: dict[Shape, int] = {
    (14336, 4096): 2,
    (4096, 14336): 1,
    (4096, 4096): 2,
    (1024, 4096): 2,
}  # and how many a block has
NUM_VALUES = 2**28
WAYS: dict[str, reference.Dequantize] = {"bitsandbytes": reference.dequantize_reference, "triton": dequantize_triton}


def milliseconds(run: Callable[[], Any]) -> float:
    """The median of 20 runs in a row."""
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for mark in marks:
        mark.record()
        run()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairwise(marks))


def measure(
    dequantize: reference.Dequantize, stored: list[tuple[torch.Tensor, torch.Tensor]], shape: Shape
) -> dict[str, Any]:
    """One shape, one way."""
    given = (*stored[0], shape, torch.bfloat16)
    unlike = int(
        (dequantize(*given).view(torch.int16) != reference.dequantize_reference(*given).view(torch.int16)).sum()
    )

    def sweep() -> list[torch.Tensor]:
        return [dequantize(codes, second, shape, torch.bfloat16) for codes, second in stored]

    eager_ms = milliseconds(sweep) / len(stored)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = sweep()
    graph_ms = milliseconds(graph.replay) / len(stored)
    num_bytes = sum(tensor.nbytes for tensor in (*stored[0], held[0]))
    return {
        "ms": round(graph_ms, 5),
        "eager_ms": round(eager_ms, 5),
        "gb_s": round(1e-6 * num_bytes / graph_ms, 1),
        "values_unlike_bitsandbytes": unlike,
    }


def copy_rate(device: torch.device) -> float:
    """GB/s of reading and writing, by torch's copy of 1 GiB."""
    source = torch.zeros(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e-6 * source.nbytes / milliseconds(lambda: target.copy_(source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    options = parser.parse_args()
    started = time.perf_counter()
    device = torch.device("cuda", 0)
    say = partial(records.say, path=options.output)
    rate, clock = copy_rate(device), time.perf_counter()
    backend = select.choose_backend(device, torch.bfloat16)
    about = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "copy_gb_s": round(rate, 1)}
    say(
        about
        | {"backend": backend.name, "reason": backend.reason, "self_test_s": round(time.perf_counter() - clock, 1)}
    )
    model_ms: dict[str, list[float]] = {}
    for shape, count in SHAPES.items():
        name = "x".join(map(str, shape))
        if options.only not in name:
            continue
        codes, second = reference.draw_weight(shape, device)
        stored = [(codes.clone(), second.clone()) for _ in range(max(1, NUM_VALUES // (shape[0] * shape[1])))]
        for case, dequantize in WAYS.items():
            row: dict[str, Any] = {"shape": name, "case": case}
            if time.perf_counter() - started > options.seconds - 1:
                say(row | {"open": "no time left"})
                continue
            try:
                row |= measure(dequantize, stored, shape)
                row["share_of_copy"] = round(row["gb_s"] / rate, 3)
                model_ms.setdefault(case, []).append(NUM_LAYERS * count * row["ms"])
            except Exception as failure:
                row["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
            say(row)
            torch.cuda.empty_cache()
    for case, parts in model_ms.items():
        if len(parts) == len(SHAPES):
            say({"shape": "all weights of Llama-8B's blocks", "case": case, "ms": round(sum(parts), 3)})


if __name__ == "__main__":
    main()
