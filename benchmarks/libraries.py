"""Ours beside a library, on one GPU in under four minutes: one Llama-8B block with its linear layers in fp8 (torchao's
row-wise recipe; ``torch._scaled_mm`` with casts that the compiler fuses), and AdamW with 8-bit states over the weights
of Llama-1B (torchao, bitsandbytes).

    python benchmarks/libraries.py --output rows.jsonl [--budget 230] [--only fp8] [--tiny]

A group is a process of its own with a time limit, a case a JSON line that is appended as it ends; one that fails says
so in its line, as does a library that is missing. ``--tiny`` has shapes for a CPU: a check that it runs.

``fp8`` cases are the forward and backward pass of a compiled block over 8,192 tokens of one sample, frozen with LoRA
r=16 or fully trained, no optimizer. ``ms`` is a median, ``peak_gib`` is above what was held before; ``output_gap`` and
``gradient_gap`` (of the block's input), without the residual stream, are relative to the same block in bfloat16 without
compilation.

``adamw`` cases take one step on float32 weights and gradients. ``state_bytes`` is what the states hold;
``resumes_equal`` says whether a second optimizer with the first one's states makes the next step bit for bit;
``halves_equal`` and ``thirds_equal`` whether a matrix that is cut into shards by rows gets the same weights as whole
(blocks of states cross no shard in halves, they do in thirds).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.bench import rows as records

E4M3 = torch.float8_e4m3fn
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUPS = {  # seconds that the group's process may take
    "fp8 ours": 75,
    "fp8 torchao": 75,
    "fp8 bfloat16": 60,
    "adamw": 90,
    "fp8 scaled_mm": 75,
}
RANK, SCALING = 16, 2.0
Block = tuple[nn.Module, dict[str, Any]]  # a decoder layer and the other arguments of its forward pass


# -- fp8: torch._scaled_mm with casts that are left to the compiler


def quantize(x: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """e4m3 values and scales (powers of two) along ``dim``, as ``kernels`` has them."""
    top = x.abs().amax(dim, keepdim=True).float().clamp(min=2.0**-100)
    scales = torch.exp2(torch.ceil(torch.log2(top / torch.finfo(E4M3).max)))
    return (x.float() / scales).to(E4M3), scales


def scaled_mm(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """(n, k) and (m, k), both by rows -> (n, m)"""
    return torch._scaled_mm(a[0], b[0].t(), a[1], b[1].t(), out_dtype=torch.bfloat16, use_fast_accum=True)


class ScaledMm(torch.autograd.Function):
    """x W^T with operands by rows; a frozen weight is quantized once for each direction, a trained one each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *frozen: Tensor) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight, *frozen)
        return scaled_mm(quantize(x), (frozen[0], frozen[1]) if frozen else quantize(weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *frozen = ctx.saved_tensors
        transposed = (frozen[2], frozen[3]) if frozen else quantize(weight.t().contiguous())
        dx = scaled_mm(quantize(dy), transposed)
        dw = None if x is None else scaled_mm(quantize(dy.t().contiguous()), quantize(x.t().contiguous()))
        return dx, dw, *([None] * len(frozen))


class ScaledMmLinear(nn.Linear):
    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, None
        self.frozen: tuple[Tensor, ...] = ()

    def freeze(self) -> None:
        with torch.no_grad():
            self.frozen = (*quantize(self.weight), *quantize(self.weight.t().contiguous()))

    def forward(self, x: Tensor) -> Tensor:
        return ScaledMm.apply(x.flatten(0, -2), self.weight, *self.frozen).view(*x.shape[:-1], self.out_features)


class Adapted(nn.Module):
    """A library's linear layer with an adapter beside it, as PEFT computes it."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * SCALING


# -- fp8: the block


def make_model(device: torch.device, tiny: bool) -> nn.Module:
    """A model of one block with random bfloat16 weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, intermediate, heads, groups = (64, 128, 4, 2) if tiny else (4096, 14336, 32, 8)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=groups,
        num_hidden_layers=1, vocab_size=256, attn_implementation="sdpa", initializer_range=hidden**-0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def adapters(model: nn.Module, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """A (r, i) and B (o, r) in float32 for each linear layer of the block, the same in all cases."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(shape, generator=draw) * std).to(device)

    linears = {name: module for name, module in model.named_modules() if name.split(".")[-1] in LINEARS}
    return {
        name: (normal(RANK, m.in_features, std=m.in_features**-0.5), normal(m.out_features, RANK, std=0.01))
        for name, m in linears.items()
    }


def swap(model: nn.Module, change: Callable[[str, nn.Linear], nn.Module]) -> None:
    for name in [name for name, _ in model.named_modules() if name.split(".")[-1] in LINEARS]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, change(name, model.get_submodule(name)))


def convert(model: nn.Module, kind: str, method: str, device: torch.device) -> None:
    """Make the model compute its linear layers as ``kind`` does, with adapters where the method is LoRA."""
    pairs = adapters(model, device) if method == "lora" else {}
    model.requires_grad_(method == "full")
    if kind == "ours":
        return convert_ours(model, method, pairs)
    if kind == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise")
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: name.split(".")[-1] in LINEARS
        )
    elif kind == "scaled_mm":
        swap(model, lambda _, base: ScaledMmLinear(base))
        if method == "lora":
            for module in model.modules():
                if isinstance(module, ScaledMmLinear):
                    module.freeze()
    if method == "lora":
        swap(model, lambda name, base: Adapted(base, *pairs[name]))


def convert_ours(model: nn.Module, method: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    from manyhands.config.schema import MethodSection
    from manyhands.convert.fp8 import quantize_frozen, use_fp8
    from manyhands.convert.fused_modules import fuse_modules
    from manyhands.convert.lora import apply_lora
    from manyhands.families import known_modules

    use_fp8(model)
    if method == "lora":
        apply_lora(model, MethodSection(name="lora", rank=RANK, alpha=SCALING * RANK), 0)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, (a, b) in pairs.items():
                found = [key for key in parameters if key.startswith(f"{name}.") and "lora_" in key]
                assert len(found) == 2, found
                for key in found:
                    parameters[key].copy_(a if "lora_A" in key else b)
    report = fuse_modules(model, known_modules())
    assert len(report.fused) == 2, report
    if method == "lora":
        quantize_frozen(model)


def block_of(model: Any, x: Tensor) -> Block:
    positions = torch.arange(x.shape[1], device=x.device)[None]
    return model.model.layers[0], {
        "position_embeddings": model.model.rotary_emb(x, positions),
        "attention_mask": None,
    }


def make_step(block: Block, x: Tensor, given: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    layer, arguments = block

    def step() -> tuple[Tensor, Tensor]:
        x.grad = None
        layer.zero_grad()
        y = layer(x, **arguments)
        y.backward(given)
        assert x.grad is not None
        return y.detach(), x.grad

    return step


def gap(found: Tensor, expected: Tensor, residual: Tensor) -> float:
    """Relative to ``expected`` without the residual stream."""
    return float(f"{float((found.float() - expected).norm() / (expected.float() - residual).norm()):.3e}")


def fp8_cases(kind: str, device: torch.device, tiny: bool, compiled: bool) -> Iterator[dict[str, Any]]:
    tokens, hidden = (64, 64) if tiny else (8192, 4096)
    for method in ("lora", "full"):
        row: dict[str, Any] = {"case": f"{kind}, {method}", "compiled": compiled, "tokens": tokens}
        try:
            torch._dynamo.reset()
            torch.manual_seed(2)
            x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
            given = torch.randn_like(x)
            reference = make_model(device, tiny)
            model = copy.deepcopy(reference)
            convert(reference, "bfloat16", method, device)
            expected = [t.clone() for t in make_step(block_of(reference, x), x, given)()]
            del reference
            gc.collect()
            convert(model, kind, method, device)
            block = block_of(model, x)
            if compiled:
                block[0].compile()
            step = make_step(block, x, given)
            row |= measure(step, device)
            y, dx = step()
            row["output_gap"] = gap(y, expected[0], x.detach())
            row["gradient_gap"] = gap(dx, expected[1], given)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield row


def measure(step: Callable[[], Any], device: torch.device, limit_s: float = 4.0) -> dict[str, Any]:
    """Milliseconds of a step (the median of up to 20), seconds of the first one, peak memory above what was held."""
    cuda = device.type == "cuda"
    started = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    first_s = time.perf_counter() - started
    for _ in range(2):
        step()
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 20 and (len(times) < 4 or time.perf_counter() - started < limit_s):
        clock = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - clock))
    row = {"ms": round(statistics.median(times), 3), "best_ms": round(min(times), 3), "first_s": round(first_s, 1)}
    if cuda:
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    return row


# -- 8-bit AdamW


def weight_shapes(tiny: bool) -> list[tuple[int, ...]]:
    """Llama-1B: 16 blocks, and embeddings shared with the head."""
    hidden, intermediate, kv, layers, vocab = (256, 512, 64, 2, 1000) if tiny else (2048, 8192, 512, 16, 128256)
    block = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    return [(vocab, hidden)] + (block + [(hidden,)] * 2) * layers + [(hidden,)]


def make_optimizer(kind: str, weights: Sequence[Tensor]) -> Any:
    keywords: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8}
    if kind == "ours":
        from manyhands.optim.adamw_8bit import BlockwiseAdamW

        return BlockwiseAdamW([{"params": list(weights), "weight_decay": 0.01, "bits": 8}], **keywords)
    keywords["weight_decay"] = 0.01
    if kind == "torchao":
        from torchao.optim import AdamW8bit

        return AdamW8bit(list(weights), **keywords)
    if kind == "bitsandbytes":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(list(weights), **keywords)
    return torch.optim.AdamW(list(weights), fused=True, **keywords)


def draw_weights(shapes: Sequence[tuple[int, ...]], device: torch.device, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, device=device) * 0.02) for shape in shapes]


def set_gradients(weights: Sequence[Tensor], seed: int) -> None:
    for weight, gradient in zip(
        weights, draw_weights([w.shape for w in weights], weights[0].device, seed), strict=True
    ):
        weight.grad = gradient.detach()


def resumes_equal(kind: str, device: torch.device) -> bool:
    weights = draw_weights([(512, 1024), (1024,)], device)
    optimizer = make_optimizer(kind, weights)
    for seed in (1, 2):
        set_gradients(weights, seed)
        optimizer.step()
    others = [nn.Parameter(weight.detach().clone()) for weight in weights]
    second = make_optimizer(kind, others)
    if kind == "ours":  # its checkpoints fill states that exist
        for weight, other in zip(weights, others, strict=True):
            second.create_state(other)
            for key, value in optimizer.state[weight].items():
                second.state[other][key].copy_(value)
    else:
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((optimizer, weights), (second, others)):
        set_gradients(own, 3)
        each.step()
    return all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def shards_equal(kind: str, device: torch.device, num_shards: int) -> bool:
    """A matrix of 1,024 rows of 300, whole and cut into shards: the same weights after three steps?"""
    (whole,) = draw_weights([(1024, 300)], device)
    parts = [nn.Parameter(part.clone()) for part in whole.detach().chunk(num_shards)]
    optimizers = [make_optimizer(kind, [whole]), make_optimizer(kind, parts)]
    for seed in (1, 2, 3):
        set_gradients([whole], seed)
        assert whole.grad is not None
        for part, gradient in zip(parts, whole.grad.chunk(num_shards), strict=True):
            part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    return torch.equal(whole, torch.cat(list(parts)))


def held_bytes(optimizer: Any) -> int:
    """Of all states; of a tensor subclass, what it is made of."""

    def count(value: Any) -> int:
        if not isinstance(value, Tensor):
            return 0
        if hasattr(value, "__tensor_flatten__"):
            return sum(count(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.numel() * value.element_size()

    return sum(count(value) for state in optimizer.state.values() for value in state.values())


def adamw_cases(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    for kind in ("torch fused, float32", "ours", "bitsandbytes", "torchao"):
        row: dict[str, Any] = {"case": kind}
        try:
            torch._dynamo.reset()
            weights = draw_weights(weight_shapes(tiny), device)
            set_gradients(weights, 1)
            optimizer = make_optimizer(kind, weights)
            row["num_values"] = sum(weight.numel() for weight in weights)
            row |= measure(optimizer.step, device)
            row["state_bytes"] = held_bytes(optimizer)
            del optimizer, weights
            row["resumes_equal"] = resumes_equal(kind, device)
            row |= {"halves_equal": shards_equal(kind, device, 2), "thirds_equal": shards_equal(kind, device, 3)}
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield row
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


# -- processes


def run_group(group: str, options: argparse.Namespace) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name, _, kind = group.partition(" ")
    cases = adamw_cases(device, options.tiny)
    if name == "fp8":
        cases = fp8_cases(kind, device, options.tiny, not options.eager)
    for row in cases:
        records.say({"run": options.run, "group": name} | row | about(device), options.output)


def about(device: torch.device) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("torch", "torchao", "bitsandbytes"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to append the rows to")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds after which no group begins or goes on")
    parser.add_argument("--only", default="", help="groups whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--eager", action="store_true", help="blocks are not compiled")
    parser.add_argument("--group", choices=GROUPS, help="this group alone, in this process")
    parser.add_argument("--run", default=records.new_run(), help="name of the call that the rows belong to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.group:
        return run_group(options.group, options)
    begin = time.monotonic()
    for group, limit_s in GROUPS.items():
        left_s = options.budget - (time.monotonic() - begin)
        if options.only not in group:
            continue
        row: dict[str, Any] = {"run": options.run, "group": group}
        if left_s < 10:
            records.say(row | {"failed": "not begun: no time left"}, options.output)
            continue
        command = [sys.executable, str(Path(__file__).resolve()), "--group", group, "--run", options.run]
        command += ["--output", str(options.output)] + ["--tiny"] * options.tiny + ["--eager"] * options.eager
        try:
            ended = subprocess.run(command, timeout=min(limit_s, left_s), stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            records.say(row | {"failed": f"ended after {min(limit_s, left_s):.0f} s"}, options.output)
            continue
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
            records.say(row | {"failed": f"exit code {ended.returncode}: {last[:300]}"}, options.output)
    print(json.dumps({"seconds": round(time.monotonic() - begin)}))


if __name__ == "__main__":
    main()
