"""Times what fp8 linear layers are made of, on one GPU: scaled matmuls at the shapes of Llama-8B, the kernels that
quantize, and the error of each matmul against float32.

    python benchmarks/fp8.py [--tokens 8192] [--output rows.jsonl] [--seconds 60] [--only matmul]

Prints one JSON line a case: TFLOP/s of matmuls, GB/s of kernels (bytes that must be read and written). Operands are
normal numbers; "heavy" errors are of inputs with a few channels 30 times as large, as language models have them. A case
that fails says so in its line; those that no longer fit into ``--seconds`` are listed as open. Needs a GPU of compute
capability 8.9.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from manyhands.bench import rows as records
from manyhands.kernels.fp8 import triton as triton_fp8

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MATMULS = {  # n tokens: k, columns of the result
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "qkv dX": (6144, 4096),
    "gate_up dX": (28672, 4096),
    "down dX": (4096, 14336),
}


def quantize(x: Tensor, dtype: torch.dtype = E4M3, dim: int | None = 1) -> tuple[Tensor, Tensor]:
    """fp8 values and scales of rows (``dim`` 1), or of the whole (None)."""
    top = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float().clamp(min=2.0**-100)
    scales = torch.exp2(torch.ceil(torch.log2(top / torch.finfo(dtype).max)))
    return (x.float() / scales).to(dtype), scales


def seconds(run: Callable[[], Any], limit_s: float = 0.4) -> float:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 20 and (len(times) < 4 or time.perf_counter() - started < limit_s):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(3):  # the launches of one hide behind the run of another
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 3e3)
    return statistics.median(times)


def matmul_cases(n: int, device: torch.device) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    for name, (k, o) in MATMULS.items():

        def made(k: int = k, o: int = o) -> tuple[Tensor, Tensor]:
            torch.manual_seed(0)
            return torch.randn(n, k, device=device).bfloat16(), (torch.randn(o, k, device=device) / k**0.5).bfloat16()

        def rate(run: Callable[[], Any], k: int = k, o: int = o) -> dict[str, Any]:
            s = seconds(run)
            return {"ms": round(1e3 * s, 4), "tflops": round(2e-12 * n * k * o / s, 1)}

        def plain(made: Any = made, rate: Any = rate) -> dict[str, Any]:
            x, w = made()
            return rate(lambda: F.linear(x, w))

        def rows(fast: bool, made: Any = made, rate: Any = rate) -> dict[str, Any]:
            (xq, xs), (wq, ws) = map(quantize, made())
            return rate(lambda: torch._scaled_mm(xq, wq.t(), xs, ws.t(), out_dtype=torch.bfloat16, use_fast_accum=fast))

        def whole(fast: bool, made: Any = made, rate: Any = rate) -> dict[str, Any]:
            (xq, xs), (wq, ws) = (quantize(t, dim=None) for t in made())
            return rate(lambda: torch._scaled_mm(xq, wq.t(), xs, ws, out_dtype=torch.bfloat16, use_fast_accum=fast))

        yield "matmul " + name, "bfloat16", plain
        for fast in (True, False):
            yield "matmul " + name, f"rows, fast {fast}", lambda fast=fast, rows=rows: rows(fast)
            yield "matmul " + name, f"tensor, fast {fast}", lambda fast=fast, whole=whole: whole(fast)

        if name in ("qkv", "gate_up", "gate_up dX"):

            def longer(k: int = k, o: int = o, rate: Any = rate) -> dict[str, Any]:
                xq, wq = torch.zeros(n, k + 48, device=device).to(E4M3), torch.zeros(o, k + 48, device=device).to(E4M3)
                xs, ws = torch.ones(n, 1, device=device), torch.ones(1, o, device=device)
                return rate(lambda: torch._scaled_mm(xq, wq.t(), xs, ws, out_dtype=torch.bfloat16, use_fast_accum=True))

            def small_blocks(both: bool, k: int = k, o: int = o, rate: Any = rate) -> dict[str, Any]:
                xq, wq = torch.randn(n, k, device=device).to(E4M3), torch.randn(o, k, device=device).to(E4M3)
                xs = torch.ones(k // 128, n, device=device).t()
                ws = (
                    torch.ones(k // 128, o, device=device)
                    if both
                    else torch.ones(o // 128, k // 128, device=device).t()
                )
                return rate(
                    lambda: torch._scaled_mm(xq, wq.t(), xs, ws, out_dtype=torch.bfloat16, use_fast_accum=False)
                )

            yield "matmul " + name, "rows, fast True, 48 more columns", longer
            yield "matmul " + name, "1x128 x 128x128", lambda small_blocks=small_blocks: small_blocks(False)
            yield "matmul " + name, "1x128 x 1x128", lambda small_blocks=small_blocks: small_blocks(True)

            def added(own: bool, o: int = o) -> dict[str, Any]:
                low, b, y = (torch.randn(*shape, device=device).bfloat16() for shape in ((n, 16), (o, 16), (n, o)))
                s = seconds(lambda: triton_fp8.add_low_rank(y, low, b) if own else y.addmm_(low, b.t()))
                return {"ms": round(1e3 * s, 4), "gb_s": round(4e-9 * n * o / s, 1)}

            yield "matmul " + name, "adding n x 16 x o to it, addmm", lambda added=added: added(False)
            yield "matmul " + name, "adding n x 16 x o to it, triton", lambda added=added: added(True)


def weight_cases(n: int, device: torch.device) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """dW = dY^T X: o x n x i"""
    for name, (i, o) in {"qkv dW": (4096, 6144), "gate_up dW": (4096, 28672), "down dW": (14336, 4096)}.items():

        def rate(run: Callable[[], Any], i: int = i, o: int = o) -> dict[str, Any]:
            s = seconds(run)
            return {"ms": round(1e3 * s, 4), "tflops": round(2e-12 * n * i * o / s, 1)}

        def plain(i: int = i, o: int = o, rate: Any = rate) -> dict[str, Any]:
            x, dy = torch.randn(n, i, device=device).bfloat16(), torch.randn(n, o, device=device).bfloat16()
            return rate(lambda: dy.t() @ x)

        def rows(i: int = i, o: int = o, rate: Any = rate) -> dict[str, Any]:
            xq, xs = torch.randn(i, n, device=device).to(E4M3), torch.ones(1, i, device=device)
            yq, ys = torch.randn(o, n, device=device).to(E4M3), torch.ones(o, 1, device=device)
            return rate(lambda: torch._scaled_mm(yq, xq.t(), ys, xs, out_dtype=torch.bfloat16, use_fast_accum=True))

        yield "matmul " + name, "bfloat16", plain
        yield "matmul " + name, "rows, fast True", rows


def kernel_cases(n: int, device: torch.device) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    def rate(run: Callable[[], Any], num_bytes: float) -> dict[str, Any]:
        s = seconds(run)
        return {"ms": round(1e3 * s, 4), "gb_s": round(1e-9 * num_bytes / s, 1)}

    compiled = torch.compile(quantize)
    for k in (4096, 14336, 28672):

        def triton_rows(k: int = k) -> dict[str, Any]:
            x = torch.randn(n, k, device=device).bfloat16()
            found, expected = triton_fp8.quantize_rows([x]), quantize(x)
            other = float((found[0].view(torch.uint8) != expected[0].view(torch.uint8)).float().mean())
            return rate(lambda: triton_fp8.quantize_rows([x]), 3 * n * k) | {"codes_unlike_torch": other}

        def compiled_rows(k: int = k) -> dict[str, Any]:
            x = torch.randn(n, k, device=device).bfloat16()
            return rate(lambda: compiled(x), 3 * n * k)

        yield f"quantize rows of {k}", "triton", triton_rows
        yield f"quantize rows of {k}", "compiled torch", compiled_rows

    def three_parts() -> dict[str, Any]:
        parts = [torch.randn(n, k, device=device).bfloat16() for k in (4096, 1024, 1024)]
        return rate(lambda: triton_fp8.quantize_rows(parts), 3 * n * 6144)

    yield "quantize rows of q, k, v", "triton", three_parts
    for k in (4096, 28672):

        def transposed(coded: bool, k: int = k) -> dict[str, Any]:
            x = torch.randn(n, k, device=device).bfloat16()
            codes, scales = triton_fp8.quantize_rows([x])
            if coded:
                return rate(lambda: triton_fp8.transpose([codes], scales, False), 2 * n * k)
            found = triton_fp8.transpose([x], scales, True)
            other = float((found.view(torch.uint8) != codes.t().contiguous().view(torch.uint8)).float().mean())
            return rate(lambda: triton_fp8.transpose([x], scales, True), 3 * n * k) | {"codes_unlike_rows": other}

        for coded in (True, False):
            kind = "triton, of fp8 values" if coded else "triton, of bfloat16"
            yield f"transposed rows of {k}", kind, lambda coded=coded, transposed=transposed: transposed(coded)
    width = 14336

    def gated(kind: str) -> dict[str, Any]:
        both = torch.randn(n, 2 * width, device=device).bfloat16()
        g, u, dh = both[:, :width], both[:, width:], torch.randn(n, width, device=device).bfloat16()
        if kind == "triton":
            _, codes, scales = triton_fp8.gated_rows(g, u, "silu")
            expected = F.silu(g.float()) * u.float()
            error = float((codes.float() * scales - expected).norm() / expected.norm())
            return rate(lambda: triton_fp8.gated_rows(g, u, "silu"), 7 * n * width) | {"error": error}
        factors = torch.ones(2 * width, device=device)
        if kind == "triton backward":
            return rate(lambda: triton_fp8.gated_rows_backward(dh, g, u, factors, "silu", True), 14 * n * width)
        if kind == "triton backward without h":
            return rate(lambda: triton_fp8.gated_rows_backward(dh, g, u, factors, "silu", False), 12 * n * width)

        @torch.compile
        def plain(g: Tensor, u: Tensor) -> tuple[Tensor, ...]:
            h = F.silu(g) * u
            return h, *quantize(h)

        return rate(lambda: plain(g, u), 7 * n * width)

    for kind in ("triton", "compiled torch", "triton backward", "triton backward without h"):
        yield "silu(g) u in fp8", kind, lambda kind=kind: gated(kind)


def error_cases(device: torch.device) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    n, k, o = 2048, 4096, 4096

    def operands(heavy: bool) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(n, k, device=device), torch.randn(o, k, device=device) / k**0.5
        if heavy:
            x[:, ::512] *= 30
        x, w = x.bfloat16(), w.bfloat16()
        return x, w, x.float() @ w.float().t()

    def gap(found: Tensor, expected: Tensor) -> dict[str, Any]:
        return {"error": float(f"{float((found.float() - expected).norm() / expected.norm()):.3e}")}

    def error(heavy: bool, dtype: torch.dtype | None, dim: int | None, fast: bool) -> dict[str, Any]:
        x, w, expected = operands(heavy)
        if dtype is None:
            return gap(F.linear(x, w), expected)
        (xq, xs), (wq, ws) = quantize(x, dtype, dim), quantize(w, E4M3, dim)
        ws = ws if dim is None else ws.t()
        return gap(torch._scaled_mm(xq, wq.t(), xs, ws, out_dtype=torch.bfloat16, use_fast_accum=fast), expected)

    for heavy in (False, True):
        kind = "heavy" if heavy else "normal"
        yield f"error {kind}", "bfloat16", lambda heavy=heavy: error(heavy, None, None, False)
        for name, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
            for dim in (1, None):
                for fast in (True, False):
                    case = f"{name} {'rows' if dim else 'tensor'}, fast {fast}"
                    yield (
                        f"error {kind}",
                        case,
                        lambda heavy=heavy, dtype=dtype, dim=dim, fast=fast: error(heavy, dtype, dim, fast),
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="", help="groups whose name contains this")
    options = parser.parse_args()
    started = time.perf_counter()
    device = torch.device("cuda", 0)
    say = partial(records.say, path=options.output)
    say({"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "tokens": options.tokens})
    cases = [*error_cases(device), *kernel_cases(options.tokens, device)]
    cases += [*matmul_cases(options.tokens, device), *weight_cases(options.tokens, device)]
    for group, name, run in cases:
        if options.only not in group:
            continue
        row: dict[str, Any] = {"group": group, "case": name}
        if time.perf_counter() - started > options.seconds - 2:
            say(row | {"open": "no time left"})
            continue
        try:
            row |= run()
        except Exception as failure:
            row["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
        say(row)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
