"""What the rank of ``test_host_shards`` does: steps of a model whose shards lie in host memory, with and without what
overlaps their copies.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from manyhands.config.schema import RunConfig
from manyhands.core.holding import gather, is_full, local
from manyhands.engine import apply
from manyhands.engine.host_shards import BackwardUpdate, BlockPrefetch, GradientNorms
from manyhands.engine.native import NativeEngine
from manyhands.kernels.adamw import FusedAdamW
from manyhands.model.structure import find_blocks
from manyhands.planner.types import Plan
from tests.support.adapters import load_adapter_state
from tests.support.layouts import Documents, build, count_loss_tokens, pack, random_adapter

Events = list[tuple[str, int, tuple[int, ...]]]  # what, of which block, and which blocks are unsharded then


class RecordedPrefetch(BlockPrefetch):
    """Records when blocks are fetched, run forward and backward."""

    def __init__(self, engine: NativeEngine) -> None:
        blocks = list(find_blocks(engine.model).values())
        super().__init__(blocks, torch.device("cpu"))
        self.events: Events = []
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._ran, "forward", index))
            for module in block.modules():
                if type(module).__name__ == "LlamaMLP":
                    module.register_full_backward_pre_hook(partial(self._ran, "backward", index))

    def _fetch(self, index: int) -> None:
        super()._fetch(index)
        self._ran("fetch", index)

    @torch.compiler.disable
    def _ran(self, what: str, index: int, *_: Any) -> None:
        gathered = [i for i, block in enumerate(self._blocks) if is_full(next(block.parameters()))]
        self.events.append((what, index, tuple(gathered)))


def measure(
    plan: Plan, config: RunConfig, micro_batches: Sequence[Documents], overlap: bool, frozen: Sequence[int] = ()
) -> dict[str, Any]:
    """Two steps of SGD and an evaluation after each: losses, gradients, norms, and what was recorded.

    ``frozen``: blocks of which nothing is trained.
    """
    with mock.patch.object(apply, "compile_blocks", partial(apply.compile_blocks, backend="aot_eager")):
        engine = build(plan, config)  # graphs, where the plan compiles: kernels of a CPU take minutes to make
    load_adapter_state(engine.model, random_adapter(engine.model, start=True))
    blocks = list(find_blocks(engine.model).values())
    for index in frozen:
        blocks[index].requires_grad_(False)
    if frozen:
        engine.model.get_input_embeddings().requires_grad_(False)
    recorded = None
    if overlap:
        engine._prefetch = recorded = RecordedPrefetch(engine)
        engine._norms = GradientNorms(engine.loss_model)
    trained = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
    engine.optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    found: dict[str, Any] = {"losses": [], "evaluated": [], "norms": [], "gradients": [], "taken": []}
    weight = sum(count_loss_tokens(documents) for documents in micro_batches)
    for _ in range(2):
        for index, documents in enumerate(micro_batches):
            loss = engine.forward(pack(documents))["lm"][0]
            engine.backward(loss / weight, last=index == len(micro_batches) - 1)
            found["losses"].append(loss.item())
        found["gradients"].append({name: gather(p.grad).float().numpy().copy() for name, p in trained.items()})
        if engine._norms is not None:
            found["taken"].append(engine._norms.of(f"model.{name}" for name in trained) is not None)
        found["norms"].append(engine.gradient_norm().item())
        engine.step(0.1, max_norm=1.0)
        with torch.no_grad():
            found["evaluated"].append(engine.forward(pack(micro_batches[0]))["lm"][0].item())
        assert not any(is_full(p) for p in engine.model.parameters()), "a checkpoint would find what was gathered"
    found["weights"] = {name: gather(p).float().numpy() for name, p in engine.model.named_parameters()}
    return found | {"events": recorded.events if recorded else []}


def drop_and_refetch(plan: Plan, config: RunConfig, documents: Documents) -> list[float]:
    """The loss after an update without a block that was fetched and not used, and with one."""
    losses = []
    for stale in (False, True):
        engine = build(plan, config)
        engine._prefetch = RecordedPrefetch(engine)
        engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        engine.backward(engine.forward(pack(documents))["lm"][0], last=True)
        if stale:
            engine._prefetch._fetch(2)
        engine.step(0.1, max_norm=1.0)
        with torch.no_grad():
            losses.append(engine.forward(pack(documents))["lm"][0].item())
    return losses


def update(plan: Plan, config: RunConfig, steps: Sequence[Sequence[Documents]], in_backward: bool) -> dict[str, Any]:
    """Steps of the run's optimizer, each of so many micro-batches: losses, norms, weights, the optimizer's states, and
    for each step whether gradients had left the device.
    """
    engine = build(plan, config)
    engine._prefetch, engine._norms = RecordedPrefetch(engine), GradientNorms(engine.loss_model)
    engine.make_optimizer(plan, config)
    assert engine._backward_update is not None
    trained = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
    found: dict[str, Any] = {"losses": [], "norms": [], "left": [], "copies": []}
    for number, micro_batches in enumerate(steps):
        if in_backward:
            engine.update_in_backward(0.01 / (1 + number))
        engine.before_update(lambda: found["copies"].append([local(p).float().sum().item() for p in trained.values()]))
        for index, documents in enumerate(micro_batches):
            loss = engine.forward(pack(documents))["lm"][0]
            engine.backward(loss / count_loss_tokens(documents), last=index == len(micro_batches) - 1)
            found["losses"].append(loss.item())
        found["left"].append(sum(p.grad is not None for p in trained.values()))
        found["norms"].append(engine.gradient_norm().item())
        engine.step(0.01 / (1 + number), max_norm=0.0)
    tensors = {name: local(tensor).float().numpy() for name, tensor in engine.checkpoint_tensors().items()}
    return found | {"tensors": tensors, "num_trained": len(trained)}


class Block(nn.Module):
    """Two layers and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def make_blocks(device: torch.device, width: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Six of them, in host memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(6))).to(dtype)
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    mesh = init_device_mesh(device.type, (1,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=module is not model, **policies)
    return model


def update_blocks(device_type: str, width: int, num_rows: int, in_backward: bool) -> dict[str, Any]:
    """Four steps of six blocks in host memory: losses, weights and states, peak bytes, seconds of the last two."""
    device = torch.device(device_type)
    model = make_blocks(device, width, torch.bfloat16)
    prefetch = BlockPrefetch(list(model), device)
    backend = "triton" if device.type == "cuda" else "eager"
    optimizer = FusedAdamW(model.parameters(), backend=backend, lr=1e-3, stream_to=device)
    update = BackwardUpdate(model, optimizer, device)
    found: dict[str, Any] = {"losses": [], "seconds": []}
    for step in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        if in_backward:
            update.begin()
        x = torch.randn(num_rows, width, device=device, generator=torch.Generator(device).manual_seed(step))
        loss = model(x).float().square().sum(1).mean()
        with prefetch.backward_pass():
            loss.backward()
        update.end()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["seconds"].append(time.monotonic() - begin)
    if device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated()
    states = [local(state).float().numpy() for values in optimizer.state.values() for state in values.values()]
    return found | {"tensors": [local(p).detach().float().numpy() for p in model.parameters()] + states}


def profile_blocks(device_type: str, width: int, num_rows: int, overlap: bool) -> dict[str, Any]:
    """Three steps of six blocks in host memory: losses, norms, peak bytes, and of copies to the GPU the share that
    passes while kernels of other streams run.
    """
    device = torch.device(device_type)
    model = make_blocks(device, width)
    prefetch = BlockPrefetch(list(model), device) if overlap else None
    norms = GradientNorms(model) if overlap else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / width)
    found: dict[str, Any] = {"losses": [], "norms": []}

    def step() -> None:
        x = torch.randn(num_rows, width, device=device, generator=torch.Generator(device).manual_seed(1))
        loss = model(x).float().square().sum(1).mean()
        with nullcontext() if prefetch is None else prefetch.backward_pass():
            loss.backward()
        names = [name for name, _ in model.named_parameters()]
        taken = norms.of(names) if norms is not None else None
        if taken is None:
            taken = [torch.linalg.vector_norm(local(p.grad), dtype=torch.float64) for p in model.parameters()]
        found["norms"].append([norm.item() for norm in taken])
        found["losses"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if norms is not None:
            norms.forget()

    step()
    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        found |= {"peak": torch.cuda.max_memory_allocated(), "hidden": hidden_share(profiler)}
    return found | {"weights": [local(p).numpy() for p in model.parameters()]}


def hidden_share(profiler: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = {
        kind: [(e["ts"], e["ts"] + e["dur"], e["args"]["stream"]) for e in events if e.get("cat") == kind and test(e)]
        for kind, test in {"kernel": lambda e: True, "gpu_memcpy": lambda e: "HtoD" in e["name"]}.items()
    }
    copied = sum(end - start for start, end, _ in spans["gpu_memcpy"])
    hidden = sum(
        max(0.0, min(end, until) - max(start, since))
        for start, end, stream in spans["gpu_memcpy"]
        for since, until, other in spans["kernel"]
        if other != stream
    )
    return hidden / copied
