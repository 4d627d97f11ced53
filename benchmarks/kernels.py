"""Times the fused kernels against plain torch, eager and compiled: one Llama-8B layer with LoRA, its MLP alone, the
head; and attention over a long-tailed pack, with and without a window, by torch's varlen and by FlashAttention 4.

    python benchmarks/kernels.py [--tokens 8192] [--output rows.jsonl] [--seconds 90] [--only head]

Random weights of the published shape in bfloat16, LoRA r=16 in float32 on all linear layers, one row of ``--tokens``
tokens, forward and backward, no optimizer. Prints one JSON line a case as it ends: the median of up to 20 runs after
warming up, peak memory above what was held before, and the error of the input's gradient against the plain eager case.
A case that fails says so in its line; cases that no longer fit into ``--seconds`` are listed as open. Without a GPU
everything is tiny: a check that it runs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands.bench import rows as records
from manyhands.config.schema import MethodSection
from manyhands.convert.fused_modules import fuse_modules
from manyhands.convert.lora import apply_lora
from manyhands.families import known_modules
from manyhands.kernels.attention.flash4 import choose_packed
from manyhands.kernels.backend import Backend
from manyhands.kernels.loss import choose_backend, chunk_rows, linear_cross_entropy
from manyhands.kernels.matmul import has_mixed_mm
from manyhands.model import attention
from manyhands.model.attention import AttentionKernels

SHAPES = {  # hidden, intermediate, heads, key-value heads, vocabulary
    "8b": (4096, 14336, 32, 8, 128256),
    "1b": (2048, 8192, 32, 8, 128256),
    "tiny": (64, 128, 4, 2, 260),
}
RUNS = 20
Step = Callable[[], torch.Tensor]  # one forward and backward pass; returns the gradient of the input


def make_layer(shape: str, device: torch.device, fused: bool) -> nn.Module:
    """A model of one block, with adapters; plain and fused hold the same numbers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, intermediate, heads, groups, _ = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        num_hidden_layers=1,
        vocab_size=256,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    apply_lora(model, MethodSection(name="lora", rank=16, alpha=32.0), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    if fused:
        report = fuse_modules(model, known_modules())
        assert len(report.fused) == 2, report
    return model


def layer_step(shape: str, tokens: int, device: torch.device, fused: bool, compiled: bool, part: str) -> Step:
    model = make_layer(shape, device, fused)
    block = model.model.layers[0]
    x = torch.randn(1, tokens, SHAPES[shape][0], device=device, dtype=torch.bfloat16).requires_grad_()
    given = torch.randn_like(x)
    trained = [p for p in block.parameters() if p.requires_grad]
    if part == "mlp":
        block = block.mlp
        arguments: dict[str, Any] = {}
    else:
        positions = torch.arange(tokens, device=device)[None]
        arguments = {"position_embeddings": model.model.rotary_emb(x, positions), "attention_mask": None}
    if compiled:
        block.compile()

    def step() -> torch.Tensor:
        x.grad = None
        for parameter in trained:
            parameter.grad = None
        block(x, **arguments).backward(given)
        assert x.grad is not None
        return x.grad

    return step


def chunked_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What the product does without the kernel: logits a chunk at a time, recomputed in the backward pass, widened to
    float32.
    """

    def chunk_loss(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(h, weight).float(), t, reduction="sum")

    rows = max(256, 2**27 // weight.shape[0])
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.stack([checkpoint(chunk_loss, h, t, use_reentrant=False) for h, t in parts]).sum()


def head_step(
    shape: str, tokens: int, device: torch.device, backend: str, trained: bool, max_logits: int | None = None
) -> Step:
    size, *_, vocab = SHAPES[shape]
    torch.manual_seed(0)
    weight = (torch.randn(vocab, size, device=device) / size**0.5).bfloat16().requires_grad_(trained)
    hidden = torch.randn(tokens, size, device=device, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    divisor = float(tokens)

    def step() -> torch.Tensor:
        hidden.grad = weight.grad = None
        if backend == "chunked":
            total = chunked_cross_entropy(hidden, weight, targets)
        else:
            total = linear_cross_entropy(hidden, weight, targets, backend=backend, max_logits=max_logits)[0]
        (total / divisor).backward()
        assert hidden.grad is not None
        return hidden.grad

    return step


def tail_of_lengths(tokens: int) -> list[int]:
    """Documents of a long-tailed mix that fill ``tokens``: log-normal around 400, at most 4,096; the last one is
    cut.
    """
    draw = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(1, min(4096, int(torch.empty(1).log_normal_(6.0, 1.0, generator=draw))))))
    return lengths


def pack_step(shape: str, tokens: int, device: torch.device, name: str, window: int | None) -> Step:
    """Attention alone, through the function that the models call; the gradient of the queries."""
    size, _, heads, groups, _ = SHAPES[shape]
    dim, dtype = size // heads, torch.bfloat16
    packs = Backend("varlen")
    if name == "flash4":
        packs = choose_packed(device, dtype, heads, groups, dim, window)
        if packs.name != name:
            raise RuntimeError(packs.reason)
    kernels = AttentionKernels(Backend(""), packs, heads, groups, dim, dtype)
    lengths = tail_of_lengths(tokens)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, n, tokens, dim, device=device, dtype=dtype).requires_grad_() for n in (heads, groups, groups)
    ]
    given = torch.randn(1, tokens, heads, dim, device=device, dtype=dtype)
    bound = 1 << (max(lengths) - 1).bit_length()
    arguments = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": bound, "max_length_k": bound}

    def step() -> torch.Tensor:
        attention._kernels = kernels
        out, _ = attention.attend_varlen(nn.Identity(), *inputs, None, sliding_window=window, **arguments)
        return torch.autograd.grad(out, inputs, given)[0]

    return step


def cases(shape: str, tokens: int, device: torch.device) -> Iterator[tuple[str, str, Callable[[], Step]]]:
    """(group, name, how to make the step); the first of a group is what the others are compared with. Most valuable
    first.
    """

    def head(
        backend: str, trained: bool, max_logits: int | None = None, of: str = shape, rows: int = tokens
    ) -> Callable[[], Step]:
        return lambda: head_step(of, rows, device, backend, trained, max_logits)

    def layer(fused: bool, compiled: bool, part: str) -> Callable[[], Step]:
        return lambda: layer_step(shape, tokens, device, fused, compiled, part)

    def pack(name: str, window: int | None) -> Callable[[], Step]:
        return lambda: pack_step(shape, 2 * tokens, device, name, window)

    smaller = "1b" if shape == "8b" else shape
    fused_loss = choose_backend(device, torch.bfloat16).name
    yield "head frozen", "plain chunked", head("chunked", False)
    yield "head frozen", f"fused {fused_loss}", head(fused_loss, False)
    for part in ("layer", "mlp"):
        yield part, "plain", layer(False, False, part)
        yield part, "plain compiled", layer(False, True, part)
        yield part, "fused compiled", layer(True, True, part)
        yield part, "fused", layer(True, False, part)
    yield f"head trained {smaller} x2 tokens", "plain chunked", head("chunked", True, of=smaller, rows=2 * tokens)
    yield (
        f"head trained {smaller} x2 tokens",
        f"fused {fused_loss}",
        head(fused_loss, True, of=smaller, rows=2 * tokens),
    )
    yield "head frozen", "fused compile", head("compile", False)
    for power in (27, 29):
        yield "head frozen", f"fused {fused_loss}, chunks of 2**{power} logits", head(fused_loss, False, 2**power)
    for power in (28, 30):
        name = f"fused {fused_loss}, chunks of 2**{power} logits"
        yield f"head trained {smaller} x2 tokens", name, head(fused_loss, True, 2**power, smaller, 2 * tokens)
    for window in (None, 512):
        for name in ("varlen", "flash4"):
            yield f"pack x2 tokens, window {window}", name, pack(name, window)


def measure(step: Step, device: torch.device, limit_s: float) -> dict[str, Any]:
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    started = time.perf_counter()
    for _ in range(3):
        gradient = step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    first_s = time.perf_counter() - started
    times: list[float] = []
    while len(times) < RUNS and (len(times) < 3 or time.perf_counter() - started - first_s < limit_s):
        if cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            gradient = step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            clock = time.perf_counter()
            gradient = step()
            times.append(1e3 * (time.perf_counter() - clock))
    row = {
        "ms": round(statistics.median(times), 3),
        "best_ms": round(min(times), 3),
        "runs": len(times),
        "warm_up_s": round(first_s, 1),
    }
    if cuda:
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
    return row | {"gradient": gradient.detach().float().cpu()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--only", default="", help="groups whose name contains this")
    options = parser.parse_args()
    started = time.perf_counter()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    shape, tokens = ("8b", options.tokens) if cuda else ("tiny", 256)
    say = partial(records.say, path=options.output)
    say(about(shape, tokens, device))
    references: dict[str, tuple[float, torch.Tensor]] = {}
    for group, name, make in cases(shape, tokens, device):
        if options.only not in group:
            continue
        row: dict[str, Any] = {"group": group, "case": name}
        left_s = options.seconds - (time.perf_counter() - started)
        if left_s < 2:
            say(row | {"open": "no time left"})
            continue
        try:
            row |= measure(make(), device, min(4.0, left_s / 2))
            gradient = row.pop("gradient")
            reference_ms, reference = references.setdefault(group, (row["ms"], gradient))
            row["speedup"] = round(reference_ms / row["ms"], 3)
            row["gradient_gap"] = float(f"{float((gradient - reference).norm() / reference.norm()):.2e}")
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        say(row)
        torch._dynamo.reset()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def about(shape: str, tokens: int, device: torch.device) -> dict[str, Any]:
    backend = choose_backend(device, torch.bfloat16)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "shape": shape,
        "tokens": tokens,
        "loss_backend": backend.name,
        "reason": backend.reason,
        "float32_sums_of_bfloat16": has_mixed_mm(device, torch.bfloat16),
        "chunk_rows_frozen": chunk_rows(tokens, SHAPES[shape][-1], False),
    }


if __name__ == "__main__":
    main()
