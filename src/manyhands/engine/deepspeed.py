"""The engine on DeepSpeed's ZeRO, stages 1 to 3: the second implementation of ``training.types.Engine``.

The contract is the loop's: a loss that is a share of the global one, gradients summed, clipped by a norm summed in
float64. DeepSpeed's engine averages over ranks at stage 3 and divides by its own number of accumulation steps; here
that number is 1, and the average is undone by a factor of the world's size. Clipping is ours, so its own is off.
Parameters keep their names; who holds what of them is answered by ``ZeroFragments``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manyhands.config.schema import RunConfig
from manyhands.core.limits import ZERO_BUCKET, ZERO_LIVE, ZERO_PREFETCH
from manyhands.core.world import World
from manyhands.engine.deepspeed_compat import copy_masters, drop_gradients, gradient_parts, open_deepspeed, quiet
from manyhands.engine.native import RankEngine, tensor_norms
from manyhands.engine.zero_partitions import gather_rows, load_fragments, register_fragments
from manyhands.model.loss import LossModel, Terms
from manyhands.model.structure import find_blocks, hugging_face_model
from manyhands.planner.layout import Layout
from manyhands.planner.types import Plan
from manyhands.training.optimizer import make_optimizer, set_learning_rate


class ZeroEngine(RankEngine):
    """A loss model inside DeepSpeed's engine, and the optimizer that updates its partitions."""

    def __init__(self, loss_model: LossModel, world: World, stage: int, inner: Any) -> None:
        super().__init__(loss_model, world)
        self._inner, self._stage = inner, stage
        self.optimizer = inner.optimizer.optimizer
        self._norm: torch.Tensor | None = None  # of the gradients that are there

    @property
    def is_local(self) -> bool:
        return self._stage < 3

    def make_optimizer(self, plan: Plan, config: RunConfig) -> str:
        """It was made with the engine, which partitions by it."""
        where = ", on the CPU" if plan.layout.offload != "none" else ""
        return f"optimizer: torch's own AdamW on DeepSpeed's partitions{where}"

    def forward(self, batch: Mapping[str, Any], *, metrics: bool = False) -> Terms:
        """Loss terms of a micro-batch; without gradients where autograd is off."""
        if torch.is_grad_enabled():
            return self._inner(batch, metrics=metrics)
        return self.loss_model(batch, metrics=metrics)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Stages 2 and 3 reduce after every micro-batch and keep partitions, stage 1 after the last one."""
        self._norm = None
        self._inner.set_gradient_accumulation_boundary(last)
        # Stage 3 knows the average alone; a factor that is a power of two is exact.
        self._inner.backward(loss * dist.get_world_size() if self._stage == 3 else loss, scale_wrt_gas=False)
        if last:
            self.gradient_norm()

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, 0-d float64, summed over this rank's partitions in float64 and then over
        ranks.
        """
        if self._norm is None:
            norms = tensor_norms([part.flatten() for part in gradient_parts(self._inner.optimizer)], self.world.device)
            total = torch.stack(norms).square().sum() if norms else torch.zeros(())
            total = total.to(self.world.device, torch.float64)
            dist.all_reduce(total)
            self._norm = total.sqrt()
        return self._norm

    @torch.no_grad()
    def step(self, learning_rate: float, *, max_norm: float) -> None:
        """Clips gradients to ``max_norm`` (0: does not), steps at the schedule's ``learning_rate`` and frees them."""
        set_learning_rate(self.optimizer, learning_rate)
        if max_norm > 0:
            factor = (max_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)
            if parts := gradient_parts(self._inner.optimizer):
                torch._foreach_mul_(parts, factor.to(parts[0]))  # which may lie in host memory
        self._inner.step()
        self._norm = None

    def drop_gradients(self) -> None:
        drop_gradients(self._inner.optimizer)
        self._norm = None

    def _saved(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Masters and states by rows: the format of every other layout."""
        return gather_rows(self.model, self.optimizer)

    def load(
        self, folder: Path, *, is_checked: bool = False, report: Callable[[str], None] = lambda text: None
    ) -> dict[str, Any]:
        """Loads a checkpoint of any layout; returns the saved state. Collective."""
        state = load_fragments(folder, self.model, self._inner.optimizer, is_checked=is_checked)
        copy_masters(self._inner.optimizer)
        return state


def apply_zero(
    loss_model: LossModel,
    plan: Plan,
    config: RunConfig,
    world: World,
    materialize: Callable[[nn.Module, torch.device], None],
) -> ZeroEngine:
    """Memory ▸ ``deepspeed.initialize`` ▸ weights: partitions are there before weights are read, so each rank reads its
    own part of the masters, in their own precision.
    """
    layout = plan.layout
    deepspeed = open_deepspeed(world)
    register_fragments()
    options = make_options(layout, world)
    model = hugging_face_model(loss_model)
    with quiet():
        give_memory(loss_model, layout, world.device, partial(deepspeed.zero.Init, config_dict_or_path=options))
        blocks = list(find_blocks(model))
        optimizer = make_optimizer(model, config.optimizer, plan.learning_rate, blocks, parts=plan.rated_parts)
        inner, *_ = deepspeed.initialize(model=loss_model, optimizer=optimizer, config=options)
    materialize(loss_model, world.device)
    copy_masters(inner.optimizer)
    return ZeroEngine(loss_model, world, layout.zero_stage, inner)


def give_memory(loss_model: LossModel, layout: Layout, device: torch.device, partition: Callable[..., Any]) -> None:
    """Parameters on ``device``, of whatever values; trained ones in the dtype that computes.

    For stage 3 ``partition`` (``zero.Init``) cuts them: a block at a time, so that no rank ever holds more of the model
    in full.
    """
    if layout.compute_copy != "none":
        for parameter in loss_model.parameters():
            parameter.data = parameter.data.to(getattr(torch, layout.compute_dtype))
    if layout.zero_stage < 3:
        loss_model.to_empty(device=device)
        hugging_face_model(loss_model).tie_weights()
        return
    made: dict[int, nn.Parameter] = {}
    for unit in (*find_blocks(loss_model.model).values(), loss_model):
        own = {id(p): p for p in unit.parameters() if id(p) not in made}
        for key, parameter in own.items():
            made[key] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        partition(module=nn.ParameterList([made[key] for key in own]))
    for module in loss_model.modules():
        for name, found in module._parameters.items():
            if found is not None:
                module._parameters[name] = made[id(found)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def make_options(layout: Layout, world: World) -> dict[str, Any]:
    """DeepSpeed's configuration. The user's own file has been translated before the plan was made."""
    pinned = {"device": "cpu", "pin_memory": world.device.type == "cuda"}
    zero: dict[str, Any] = {
        "stage": layout.zero_stage,
        "overlap_comm": world.device.type == "cuda",
        "contiguous_gradients": True,
        "reduce_bucket_size": ZERO_BUCKET,
        "allgather_bucket_size": ZERO_BUCKET,
        "memory_efficient_linear": False,  # else torch.nn.functional.linear is replaced for the whole process
    }
    if layout.offload != "none":
        zero["offload_optimizer"] = pinned
    if layout.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": ZERO_PREFETCH, "stage3_max_live_parameters": ZERO_LIVE}
        zero |= {"offload_param": pinned} if layout.offload == "all" else {}
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the loss comes divided; where a step ends is said to the engine
        "gradient_clipping": 0.0,  # ours, by a norm in float64
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": layout.compute_copy != "none"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own is compiled when it is first needed
    }
    return options if layout.zero_stage == 3 else options | {"gradient_allreduce_op": "sum"}
