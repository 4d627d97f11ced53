"""Effects of ``parallel.*``: how many processes, on what, and what is done to the model in each."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.core.errors import FAULT, OUT_OF_MEMORY, UserError
from manyhands.core.files import write_json
from manyhands.core.world import World
from manyhands.engine import apply
from manyhands.engine.activations import ActivationStore
from manyhands.engine.apply import compile_blocks as compile_all
from manyhands.engine.optimizers import StreamedOptimizer
from manyhands.launch.local import start as launch_start
from manyhands.launch.local.heartbeat import Beat
from manyhands.launch.local.start import start
from manyhands.launch.local.watch import Watch
from manyhands.launch.run.folder import RunFolder
from manyhands.planner.layout import Mesh
from manyhands.planner.search import plan
from manyhands.planner.types import Plan
from manyhands.worker.batches import open_workers
from manyhands.worker.rendezvous import pick_device
from tests.keys.lab import Lab, LabRank, first_batch
from tests.planner.examples import facts, mixture, model_facts


def gpus(lab: Lab) -> None:
    """As many processes as asked are what torch's agent is told to start."""
    started = []

    def elastic_launch(config: Any, _: str) -> Any:
        started.append(config.nproc_per_node)
        return lambda *arguments: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
        patch.delenv("RANK", raising=False)
        assert start(lab.config({"parallel.gpus": 3})) == start(lab.config()) == 0
    assert started == [3, 1]


def nodes(lab: Lab) -> None:
    """A plan is for so many machines like this one; one of them does not start the run alone."""
    sizes = [lab.prepare({"parallel.nodes": asked}).plan.layout.world_size for asked in ("auto", 1, 3)]
    assert sizes == [1, 1, 3]
    with pytest.raises(UserError, match="this machine would train alone"):
        start(lab.config({"parallel.nodes": 3}))


def device(lab: Lab) -> None:
    with_gpus = facts(gpus=2)
    assert [
        plan(lab.config({"parallel.device": asked}), with_gpus).layout.device for asked in ("auto", "cuda", "cpu")
    ] == [
        "cuda",
        "cuda",
        "cpu",
    ]
    with pytest.raises(UserError, match="no GPU is visible"):
        plan(lab.config({"parallel.device": "cuda"}), facts())
    chosen = plan(lab.config({"parallel.device": "cpu"}), with_gpus)
    assert pick_device(chosen.layout.device, 0) == torch.device("cpu")
    assert next(lab.base.rank.model.parameters()).device == torch.device("cpu")


def strategy(lab: Lab) -> None:
    """fsdp shards (DTensors) along one axis, hsdp along one of two, single does not; two processes are planned for what
    is asked. What DeepSpeed trains is seen in tests/engine/test_deepspeed.py.
    """
    names, named = ("single", "fsdp", "hsdp"), ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
    axes = {name: {num_axes(p) for p in lab.start({"parallel.strategy": name}).model.parameters()} for name in names}
    assert axes == {"single": {0}, "fsdp": {1}, "hsdp": {2}}
    wishes = [lab.config({"parallel.strategy": name, "parallel.gpus": 2}) for name in named]
    assert [plan(wish, facts()).layout.strategy for wish in wishes] == list(named)
    assert lab.run({"parallel.strategy": "fsdp"}).losses == pytest.approx(lab.base.losses, rel=1e-6)


def num_axes(parameter: torch.Tensor) -> int:
    return parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0


def shard_degree(lab: Lab) -> None:
    """So many ranks hold a copy together: a mesh of (copies, ranks a copy)."""
    hsdp = {"parallel.strategy": "hsdp", "parallel.gpus": 4}
    for asked, shape in ((2, (2, 2)), ("auto", (1, 4)), (1, (4, 1))):
        made = plan(lab.config({**hsdp, "parallel.shard_degree": asked}), facts())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apply, "init_device_mesh", lambda device, shape, mesh_dim_names: shape)
            assert apply.make_mesh(made.layout, World(0, 0, 4, torch.device("cpu"))) == shape


def context_degree(lab: Lab) -> None:
    """So many neighbors are one data-parallel rank, each with a part of its packs; test_context.py trains."""
    divided = {"parallel.gpus": 4, "parallel.context_degree": 2, "parallel.strategy": "fsdp"}
    made = plan(lab.config(divided), facts())
    assert made.layout.mesh == Mesh(shard=2, context=2) and made.layout.data_parallel_degree == 2
    assert made.layout.full_micro_tokens == plan(lab.config({"parallel.gpus": 2}), facts()).layout.full_micro_tokens / 2


def expert_degree(lab: Lab) -> None:
    """So many ranks divide the experts, beside any strategy; tests/engine/test_expert_parallel.py trains."""
    for degree in (1, 2, 4):
        made = plan(lab.config({"parallel.gpus": 4, "parallel.expert_degree": degree}), facts(mixture()))
        assert made.layout.expert_degree == degree and made.layout.world_size == 4


def offload(lab: Lab) -> None:
    """all: shards by FSDP2's own policy; optimizer: a step in chunks. The losses are those of neither."""
    rank = lab.start({"parallel.offload": "all"})
    groups = [fsdp_group(unit) for unit in rank.loss_model.modules() if isinstance(unit, FSDPModule)]
    assert groups and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
    assert not any(isinstance(group.mesh_info, DDPMeshInfo) for group in groups)
    streams = {
        asked: isinstance(lab.start({"parallel.offload": asked}).engine.optimizer, StreamedOptimizer)
        for asked in ("none", "optimizer")
    }
    assert streams == {"none": False, "optimizer": True}
    for asked in ("optimizer", "all"):
        assert lab.run({"parallel.offload": asked}).losses == lab.base.losses


def fsdp_group(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()._fsdp_param_group


def offload_activations(lab: Lab) -> None:
    """What the blocks save for the backward pass goes through the store; the losses stay. auto leaves it on a CPU."""
    packed = {}
    for asked in (False, True, "auto"):
        calls: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            pack = ActivationStore.pack
            patch.setattr(
                ActivationStore,
                "pack",
                lambda self, tensor, calls=calls, pack=pack: (calls.append(1), pack(self, tensor))[1],
            )
            rank = lab.start({"parallel.offload_activations": asked, "parallel.activation_checkpointing": "full"})
            forward(rank).backward()
        packed[asked] = len(calls)
    assert packed[True] > packed[False] == packed["auto"] == 0
    assert lab.run({"parallel.offload_activations": True}).losses == lab.base.losses


def reshard_after_forward(lab: Lab) -> None:
    """After the forward pass a block's weights are shards again, or still whole."""
    for asked in (True, False):
        rank = lab.start({"parallel.strategy": "fsdp", "parallel.reshard_after_forward": asked})
        forward(rank)
        weight = rank.model.get_submodule("model.layers.0.mlp.up_proj").weight
        assert isinstance(weight, DTensor) is asked


def activation_checkpointing(lab: Lab) -> None:
    """Recomputed blocks begin once more in the backward pass; selective multiplies once."""
    counts: dict[str, int] = {}
    products: dict[str, int] = {}
    for asked in ("none", "selective", "except_attention", "full"):
        rank, calls = lab.start({"parallel.activation_checkpointing": asked}), []
        rank.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        loss = forward(rank)
        with CountProducts() as counter:
            loss.backward()
        counts[asked], products[asked] = len(calls), counter.number
    assert counts == {"none": 1, "selective": 2, "except_attention": 2, "full": 2}
    assert products["none"] <= products["selective"] < products["except_attention"] <= products["full"]


class CountProducts(TorchDispatchMode):
    """Matrix products that are really computed: those that a checkpoint has kept do not come this far."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.name().startswith("aten::mm")
        return func(*args, **(kwargs or {}))


def ddp_bucket_mb(lab: Lab) -> None:
    """The plan carries it to DDP's own option; auto is one bucket for adapters."""
    seen: list[int] = []
    rank = lab.start({})

    class Replica:
        def __init__(self, model: Any, *, bucket_cap_mb: int, **_: Any) -> None:
            self.model = model
            seen.append(bucket_cap_mb)

        def register_comm_hook(self, *_: Any) -> None:
            pass

    for asked in (7, "auto"):
        wish = {"parallel.strategy": "ddp", "parallel.gpus": 2, "parallel.ddp_bucket_mb": asked}
        layout = plan(lab.config(wish), facts()).layout
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apply, "DistributedDataParallel", Replica)
            patch.setattr(apply, "NativeEngine", lambda *_, replica, **others: replica)
            patch.setattr(apply, "make_mesh", lambda *_: None)
            apply.apply(rank.loss_model, rank.plan.model_copy(update={"layout": layout}), rank.world, lambda *_: None)
    assert seen == [7, 4096]


def cuda_graphs(lab: Lab) -> None:
    """Blocks are compiled for them and the engine keeps gradients out of their memory; auto has them where the host is
    the limit.
    """
    small, seen = model_facts(hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, vocab=49152), {}
    rank = lab.start({})
    for asked in (True, False, "auto"):
        wish = {"parallel.cuda_graphs": asked, "parallel.device": "auto", "batch.samples": 16}
        layout = plan(lab.config(wish), facts(small, gpus=1)).layout
        with pytest.MonkeyPatch.context() as patch:
            given: dict[str, Any] = {}
            patch.setattr(apply, "compile_blocks", lambda _, given=given, **options: given.update(options))
            patch.setattr(apply, "compile_towers", lambda _: None)
            patch.setattr(apply, "NativeEngine", lambda *_, given=given, **others: given.update(others))
            apply.apply(rank.loss_model, rank.plan.model_copy(update={"layout": layout}), rank.world, lambda *_: None)
        seen[asked] = given.get("options"), given["cuda_graphs"]
    recorded = {"triton.cudagraphs": True}, True
    assert seen == {True: recorded, False: (None, False), "auto": recorded}


def compile_blocks(lab: Lab) -> None:
    """Blocks become graphs (of dynamo; the slow making of kernels is left out), and give the same loss."""
    graphs: dict[bool, int] = {}
    losses = []
    for asked in (True, False):
        seen: list[Any] = []

        def backend(graph: Any, _: Any, seen: list[Any] = seen) -> Any:
            seen.append(graph)
            return graph.forward

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apply, "compile_blocks", functools.partial(compile_all, backend=backend))
            rank = lab.start({"parallel.compile": asked})
        losses.append(forward(rank).item())
        graphs[asked] = len(seen)
    assert graphs[True] > 0 and graphs[False] == 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def workers(lab: Lab) -> None:
    """So many processes collate while the run trains, none by default on a CPU; the batches are the same."""
    counts = {}
    for asked in (0, "auto", 2):
        rank = lab.start({"data.workers": asked})
        workers = open_workers(rank.rank, rank.data)
        counts[asked] = workers.num_workers if workers is not None else 0
        if workers is not None:
            workers.close()
    assert counts == {0: 0, "auto": 0, 2: 2}
    assert lab.run({"data.workers": 2}).losses == lab.base.losses


@contextlib.contextmanager
def launching(run_workers: Callable[..., int]) -> Iterator[None]:
    """Within, a start runs this in place of its processes, at once again after a fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_start, "run_workers", run_workers)
        patch.setattr("manyhands.launch.restart.restarts.FIRST_WAIT_S", 0.0)
        patch.delenv("RANK", raising=False)
        yield


def timeout_s(lab: Lab) -> None:
    """The launcher's watch ends a rank that stands still for so long, and not before."""
    verdicts = []

    def run_idle(folder: RunFolder, plan: Plan, *, timeout_s: float, **_: object) -> int:
        with subprocess.Popen(["sleep", "2"], start_new_session=True) as rank:
            begin = time.monotonic()
            folder.ranks.mkdir(exist_ok=True)
            write_json(folder.beat(0), asdict(Beat(0, rank.pid, "train", 1, begin, begin)))
            with Watch(folder, 1, timeout_s) as watch:
                rank.wait()
        verdicts.append(watch.verdict)
        return 0

    with launching(run_idle):
        for seconds in (1, 600):
            start(lab.config({"parallel.timeout_s": seconds}))
    assert ["parallel.timeout_s = 1)" in str(verdict) for verdict in verdicts] == [True, False]
    assert verdicts[1] is None


def restarts(lab: Lab) -> None:
    """Each launch ends with a fault at another step; so many more are started."""
    counts = []
    for asked in (0, 2):
        launches: list[int] = []

        def fail(folder: RunFolder, plan: Plan, launches: list[int] = launches, **_: object) -> int:
            launches.append(len(launches))
            folder.ranks.mkdir(exist_ok=True)
            write_json(folder.beat(0), asdict(Beat(0, 1, "train", len(launches), 0.0, 0.0)))
            raise UserError("rank 0 was killed (SIGKILL)", kind=FAULT)

        with launching(fail), pytest.raises(UserError, match="was killed"):
            start(lab.config({"launch.restarts": asked}))
        counts.append(len(launches))
    assert counts == [1, 3]
    plans: list[Plan] = []

    def run_out(folder: RunFolder, plan: Plan, **_: object) -> int:
        plans.append(plan)
        error = UserError("out of memory", kind=OUT_OF_MEMORY)
        folder.ranks.mkdir(exist_ok=True)
        folder.log(0).touch()
        folder.write_failed(error, plan)
        raise error

    for asked in (0, 1):
        with launching(run_out), pytest.raises(UserError, match="out of memory"):
            start(lab.config({"launch.restarts": asked}))
    first, again, *smaller = plans
    assert first.layout == again.layout and 1 <= len(smaller) <= launch_start.MAX_SMALLER_PLANS
    assert all(made.cause == "out_of_memory" for made in smaller)


def min_gpus(lab: Lab) -> None:
    """A device that fails twice is left out where that is allowed, with the same samples in each step: of 4 processes 3
    are left, of which 2 share 8 samples exactly.
    """
    for asked in (None, 2):
        plans: list[Plan] = []

        def fail(folder: RunFolder, plan: Plan, plans: list[Plan] = plans, **_: object) -> int:
            plans.append(plan)
            if plan.layout.world_size < 4:
                return 0
            error = UserError("rank 1 failed: CUDA error: uncorrectable ECC error encountered", kind=FAULT)
            error.rank = 1
            raise error

        keys = {"parallel.gpus": 4, "data.packing": False, "batch.micro_samples": 2, "batch.accumulation": 1}
        config = lab.config(keys | ({} if asked is None else {"launch.min_gpus": asked}))
        refused = pytest.raises(UserError, match="rank 1 is lost") if asked is None else contextlib.nullcontext()
        with launching(fail), refused:
            start(config)
        assert [made.layout.world_size for made in plans] == ([4, 4] if asked is None else [4, 4, 2])
        assert {made.batch_samples for made in plans} == {8}
    assert (plans[-1].layout.accumulation, plans[-1].cause, plans[-1].config_digest) == (2, "resize", config.digest)


def forward(rank: LabRank) -> torch.Tensor:
    """The loss sum of the first micro-batch."""
    rank.loss_model.train()
    return rank.engine.forward(first_batch(rank))["lm"][0]
