"""The engine on torch's own parallelism: FSDP2, DDP or a single process. Implements ``training.types.Engine`` and what
the worker calls (``worker.rank.RunEngine``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from manyhands.checkpoint.load import load_checkpoint
from manyhands.checkpoint.save import save_checkpoint
from manyhands.checkpoint.tensors import checkpoint_tensors
from manyhands.config.schema import RunConfig
from manyhands.core.holding import local
from manyhands.core.limits import UPDATE_SLICE
from manyhands.core.world import World
from manyhands.engine.experts import DividedExperts
from manyhands.engine.gradient_memory import GradientMemory
from manyhands.engine.host_shards import BackwardUpdate, BlockPrefetch, GradientNorms, PerParameterOptimizer
from manyhands.engine.masters import ComputeCopy
from manyhands.engine.optimizers import make_engine_optimizer
from manyhands.model.loss import LossModel, Terms
from manyhands.planner.types import Plan
from manyhands.training.optimizer import rates_by_pattern, set_learning_rate

SHARD = "shard"  # the axis of a mesh along which parameters and gradients are cut


class RankEngine:
    """What engines share: the model, its optimizer, logits, and collectives over all ranks."""

    optimizer: torch.optim.Optimizer  # not there before ``make_optimizer``

    def __init__(self, loss_model: LossModel, world: World) -> None:
        self.model: nn.Module = loss_model.model
        self.loss_model = loss_model
        self.world = world

    @torch.no_grad()
    def logits(self, batch: Mapping[str, Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (b, t, v) of a small batch, by the model's own forward pass, or (m, v) of its flat positions ``rows``
        alone. All ranks call it where weights are sharded.
        """
        logits = self.loss_model.logits(batch, rows)
        self._free_gathered()
        return logits

    @torch.no_grad()
    def next_token_logits(self, input_ids: torch.Tensor, entries: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Logits (b, v) after the rows (b, t). All ranks call it, equally often, where weights are sharded."""
        logits = self.loss_model.next_token_logits(input_ids, entries)
        self._free_gathered()
        return logits

    def learning_rates(self) -> dict[str, float]:
        """The present rate of each of ``optimizer.learning_rates``, by pattern."""
        return rates_by_pattern(self.optimizer)

    def update_in_backward(self, learning_rate: float) -> None:
        """Does nothing here: it gains only where weights lie in host memory."""

    def drop_gradients(self) -> None:
        """Forgets what backward passes have given since the last step."""
        self.optimizer.zero_grad(set_to_none=True)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; returns it."""
        if self.world.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A small tensor from every rank, in rank order."""
        if self.world.world_size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def save(
        self,
        folder: Path,
        state: dict[str, Any],
        *,
        manifest_extra: dict[str, Any] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Saves trained parameters, optimizer states and ``state`` as the checkpoint ``folder``. Collective."""
        model, optimizer = self._saved()
        save_checkpoint(
            folder,
            model,
            optimizer,
            state,
            rank=self.world.rank,
            world_size=self.world.world_size,
            progress=progress,
            manifest_extra=manifest_extra,
        )

    def _saved(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and the optimizer whose tensors a checkpoint holds. Collective."""
        return self.model, self.optimizer

    def _free_gathered(self) -> None:
        """After a forward pass that no backward pass follows."""


class NativeEngine(RankEngine):
    """A loss model with its parallelism applied (``engine/apply.py``), and its optimizer.

    ``mesh``: what FSDP2 shards over; every rank holds only its part of the gradients along its shard axis. ``replica``:
    the DDP module around the loss model. ``reduce_every``: shards are reduced after every micro-batch, not after the
    last one. ``copy``: what computes in place of the parameters, refreshed once a step. ``prefetch`` and ``norms``: of
    shards in host memory. ``memory``: where sharded gradients are allocated. ``experts``: those that ranks divide.
    ``cuda_graphs``: blocks are launched as CUDA graphs, whose results the next forward pass overwrites.
    """

    def __init__(
        self,
        loss_model: LossModel,
        world: World,
        *,
        mesh: DeviceMesh | None = None,
        replica: DistributedDataParallel | None = None,
        reduce_every: bool = True,
        copy: ComputeCopy | None = None,
        prefetch: BlockPrefetch | None = None,
        norms: GradientNorms | None = None,
        memory: GradientMemory | None = None,
        experts: DividedExperts | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__(loss_model, world)
        self._replica, self._copy = replica, copy
        self._prefetch, self._norms, self._memory, self._experts = prefetch, norms, memory, experts
        if replica is not None:
            replica.require_backward_grad_sync = False  # ``backward`` prepares the reducer itself
        self._backward_update: BackwardUpdate | None = None
        self._norm: torch.Tensor | None = None  # of the gradients that are there
        self._before_update: list[Callable[[], None]] = []
        self._reduce_every, self._cuda_graphs = reduce_every, cuda_graphs
        # The axis over which gradients are sharded; with one rank on it there is nothing to sum.
        self._shard_group = mesh[SHARD].get_group() if mesh is not None and mesh[SHARD].size() > 1 else None
        self._is_replicated = mesh is not None and mesh.size() > mesh[SHARD].size()
        # False while the gradients of a step's first micro-batch lie in the memory of CUDA graphs. Masters have copies.
        self._owns_gradients = False
        self._is_reduced = False  # whether a micro-batch of this step has given shards of gradients
        self._has_idle_parts = False  # whether no micro-batch of this step reaches the optional parts, on any rank
        self._units = [module for module in loss_model.modules() if isinstance(module, FSDPModule)]
        # Trained in bfloat16, whose gradients autograd would add up in bfloat16 if it were not given float32 to add to.
        self._narrow = [p for p in loss_model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
        for parameter in self._narrow:
            parameter.grad_dtype = None  # any

    @property
    def is_local(self) -> bool:
        """Whether this rank can run a forward pass without any other rank."""
        return not self._units and self._experts is None

    def make_optimizer(self, plan: Plan, config: RunConfig) -> str:
        """The optimizer of the plan over the trained parameters; returns which kernels run it and why, if it is worth
        a line.
        """
        self.optimizer, note = make_engine_optimizer(self.model, plan, config, self.world.device, self._copy)
        if (
            self._norms is not None
            and isinstance(self.optimizer, PerParameterOptimizer)
            and self.loss_model.optional_parts is None
        ):
            self._backward_update = BackwardUpdate(self.loss_model, self.optimizer, self.world.device)
        return note

    def update_in_backward(self, learning_rate: float) -> None:
        """Updates weights in host memory during the next backward pass, on a single rank."""
        if self._backward_update is not None:
            set_learning_rate(self.optimizer, learning_rate)
            self._backward_update.begin()

    def forward(self, batch: Mapping[str, Any], *, metrics: bool = False) -> Terms:
        """Loss terms of a micro-batch; without gradients where autograd is off."""
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if torch.is_grad_enabled():
            parts = self.loss_model.optional_parts
            self._has_idle_parts = parts is not None and parts.are_idle(batch)
            return (self._replica or self.loss_model)(batch, metrics=metrics)
        terms = self.loss_model(batch, metrics=metrics)
        self._free_gathered()
        return terms

    def logits(self, batch: Mapping[str, Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        with self._without_graphs():
            return super().logits(batch, rows)

    def next_token_logits(self, input_ids: torch.Tensor, entries: Mapping[str, Any] | None = None) -> torch.Tensor:
        with self._without_graphs():
            return super().next_token_logits(input_ids, entries)

    def _without_graphs(self) -> AbstractContextManager[Any]:
        """For batches of shapes of their own, each of which would be recorded."""
        return torch.compiler.set_stance("force_eager") if self._cuda_graphs else nullcontext()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Adds the gradients of ``loss`` to those of the step's earlier micro-batches; ``last`` reduces them over
        ranks.

        Shards are reduced after every micro-batch, unless full gradients may wait on every rank (``reduce_every``
        false). What earlier micro-batches gave is summed in float32, whatever dtype it came in. Optional parts that the
        step does not reach have zeros from every rank: these are dropped, so that no weight moves or decays.
        """
        for parameter in self._narrow:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.float()
        self._reduce_in_backward(last)
        self._norm = None
        if self._backward_update is not None and self._backward_update.is_on:
            if last:
                _call_all(self._before_update)
            else:
                self._backward_update.is_on = False  # further micro-batches compute with the same weights
        with nullcontext() if self._prefetch is None else self._prefetch.backward_pass():
            loss.backward()
        if self._cuda_graphs and self._copy is None and not last and not self._owns_gradients:
            gradients = {p: p.grad for p in self.loss_model.parameters() if p.grad is not None}
            copies = [torch.empty_like(gradient) for gradient in gradients.values()]
            torch._foreach_copy_(copies, [*gradients.values()])
            for parameter, copy in zip(gradients, copies, strict=True):
                parameter.grad = copy
            self._owns_gradients = True
        if last and self._experts is not None:
            self._experts.reduce_gradients()
        if last and self._has_idle_parts:
            assert self.loss_model.optional_parts is not None
            for parameter in self.loss_model.optional_parts.trained(self.model):
                parameter.grad = None

    def _reduce_in_backward(self, last: bool) -> None:
        """Whether the backward pass that follows reduces gradients over ranks."""
        if self._copy is not None:
            self._copy.accumulates = not last
        elif self._replica is not None:
            if last:
                # Whatever the forward pass was. DDP itself decides there (``no_sync`` has to be around both); PyTorch
                # Lightning prepares the reducer between the two as well (``prepare_for_backward`` in
                # lightning/pytorch/overrides/distributed.py).
                self._replica.reducer.prepare_for_backward([])  # no parameter is unused
        elif isinstance(self.loss_model, FSDPModule):
            reduces = last or self._shard_group is None or self._reduce_every
            if self._shard_group is not None and not self._reduce_every:
                self.loss_model.set_requires_gradient_sync(last)
            else:
                self.loss_model.set_requires_all_reduce(last)
            if self._memory is not None:
                # Replicas add up a step's earlier results apart from the gradients, which the last ones become.
                become = not self._is_reduced and (last or not self._is_replicated)
                self._memory.prepare(self.world.device, become_gradients=become)
            self._is_reduced |= reduces

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, 0-d float64. Summed over shards only: replicas hold the same gradients already.

        In float64, because float32 norms of different layouts differ in the last digit, and clipping spreads that
        digit.
        """
        updated = set() if self._backward_update is None else self._backward_update.updated
        named = self.model.named_parameters(prefix="model")  # as in the loss model
        gradients = {name: p.grad for name, p in named if p.grad is not None or name in updated}
        norms = None if self._norms is None else self._norms.of(gradients)
        if norms is None:
            assert not updated, "a gradient that has been used comes no second time"
            divided = set() if self._experts is None else self._experts.parameters
            norms = self._norms_of(p for p in self.model.parameters() if p not in divided)
        total = self._sum_squares(norms, self._shard_group)
        if self._experts is not None:
            total += self._sum_squares(self._norms_of(divided), self._experts.group)
        self._norm = total.sqrt()
        return self._norm

    def _norms_of(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        return tensor_norms([local(p.grad) for p in parameters if p.grad is not None], self.world.device)

    def _sum_squares(self, norms: list[torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
        """0-d float64, over the ranks of ``group`` too."""
        none = torch.zeros((), dtype=torch.float64, device=self.world.device)
        total = torch.stack(norms).square().sum() if norms else none
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    def step(self, learning_rate: float, *, max_norm: float) -> None:
        """Clips gradients to ``max_norm`` (0: does not), steps at the schedule's ``learning_rate`` and frees them."""
        self._end_copies()
        set_learning_rate(self.optimizer, learning_rate)
        if self._backward_update is not None:
            self._backward_update.end()
        if max_norm > 0:
            clip_gradients(self.optimizer, self.gradient_norm() if self._norm is None else self._norm, max_norm)
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._norm, self._is_reduced, self._owns_gradients = None, False, False
        if self._norms is not None:
            self._norms.forget()

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """What ``save`` saves, sharing memory with the model and the optimizer: the next ``step`` changes it."""
        return checkpoint_tensors(self.model, self.optimizer)

    def before_update(self, call: Callable[[], None]) -> None:
        """``call`` is called once, by the next ``step`` or ``load``, before it changes anything."""
        self._before_update.append(call)

    def _end_copies(self) -> None:
        if self._prefetch is not None:
            self._prefetch.drop()
        _call_all(self._before_update)

    def load(
        self, folder: Path, *, is_checked: bool = False, report: Callable[[str], None] = lambda text: None
    ) -> dict[str, Any]:
        """Loads what ``save`` wrote, from any number of ranks, in place; returns the saved state. Collective."""
        self._end_copies()
        return load_checkpoint(folder, self.model, self.optimizer, is_checked=is_checked, report=report)

    def _free_gathered(self) -> None:
        # Without a backward pass gathered weights would stay registered, and an optimizer or a checkpoint would find
        # them in place of the shards.
        for unit in self._units:
            unit.reshard()


def _call_all(calls: list[Callable[[], None]]) -> None:
    """Each of them once."""
    while calls:
        calls.pop(0)()


def tensor_norms(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """2-norms on ``device``, 0-d float64, in any order: of each tensor there, and of each slice of those elsewhere.

    Widened as they are read: ``torch.linalg.vector_norm`` would write full float64 copies first, 20 bytes a float32
    value in place of 4. Apart by dtype, because the kernel that sums many tensors at once takes one.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    norms: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.device.type == device.type:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
            continue
        for piece in tensor.reshape(-1).split(UPDATE_SLICE):  # in host memory
            norms += torch._foreach_norm([piece.to(device, non_blocking=True)], 2, dtype=torch.float64)
    return norms + [norm for alike in by_dtype.values() for norm in torch._foreach_norm(alike, 2, dtype=torch.float64)]


@runtime_checkable
class ScalesGradients(Protocol):
    """An optimizer whose next step multiplies gradients by a factor while it reads them: clipping costs no pass over
    them.
    """

    gradient_factor: torch.Tensor | None  # 0-d float32, on the device that updates


def clip_gradients(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)), in place, without a host synchronization.

    The factor comes from a norm summed in float64: float32 norms differ in the last digit between layouts, and through
    the factor that digit reaches every weight. An optimizer that scales by itself gets the factor, and gradients stay.
    """
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    parts = [local(grad) for grad in grads]
    if not parts:
        return
    factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    if isinstance(optimizer, ScalesGradients):
        optimizer.gradient_factor = factor.to(torch.float32)
    else:
        torch._foreach_mul_(parts, factor.to(parts[0]))  # which may lie in host memory
