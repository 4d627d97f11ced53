"""Float32 masters that compute in bfloat16, in one process: what ``fully_shard`` does for one rank, without its copies.

Numerics are those of ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)``, bit for bit. Per step the
masters are cast once (6 bytes a parameter moved) and each gradient is widened once, where FSDP2 casts, packs, divides
by one and copies. An optimizer that takes narrow gradients and writes the copy itself spares both. Must not know data,
the loop or what the model computes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

NO_BACKWARD = -1  # autograd's number of the present backward pass where there is none


class ComputeCopy:
    """A copy of every parameter in ``dtype``, which replaces it in the modules during forward and backward passes.

    Outside of that the modules hold the masters, under the same names: optimizer, checkpoints and export see nothing
    else. ``entrances`` are the modules whose forward passes may be called from outside; nested calls count as one pass.

    Gradients arrive at the copies and are added up in the masters' ``grad`` at once, in the masters' dtype. The copies
    are leaves that live as long as the model, so compiled graphs see the same tensors at every call; tied parameters
    share one.
    """

    def __init__(self, root: nn.Module, entrances: list[nn.Module], dtype: torch.dtype) -> None:
        self.accumulates = False  # whether more micro-batches follow before the optimizer steps: the copy stays valid
        self._keeps_narrow = (
            False  # a gradient that nothing is added to stays in the copy's dtype: widened it is the same number
        )
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self._masters: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._make(root, dtype)
        # An optimizer need not raise the version of what it writes (torch's fused ones and bitsandbytes do not), so the
        # copy is also stale after the backward pass of a step's last micro-batch. Weights that were loaded show by
        # their versions.
        self._is_stale, self._versions = True, 0
        self._depth = 0  # of nested passes; the copies are in the modules while it is not 0
        self._backward: int | None = None  # the backward pass that holds them there
        for module in entrances:
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward, always_call=True)

    def _make(self, root: nn.Module, dtype: torch.dtype) -> None:
        made: dict[int, nn.Parameter] = {}
        for module in root.modules():
            for name, master in module._parameters.items():
                if master is None:
                    continue
                if id(master) not in made:
                    copy = made[id(master)] = nn.Parameter(torch.empty_like(master, dtype=dtype, requires_grad=False))
                    copy.register_post_accumulate_grad_hook(functools.partial(self._add_to_master, master))
                    self._masters.append(master)
                    self._copies.append(copy)
                self._places.append((module._parameters, name, master, made[id(master)]))

    def enter_by(self, module: nn.Module, method: str) -> None:
        """Let this method of ``module``, which is not its forward pass, compute with the copies too."""
        call = getattr(module, method)

        @functools.wraps(call)
        def entered(*arguments: Any, **keywords: Any) -> Any:
            self._before_forward()
            try:
                output = call(*arguments, **keywords)
            except BaseException:
                self._leave()
                raise
            self._after_forward(module, arguments, output)
            return output

        setattr(module, method, entered)

    def share_copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """The copy of each master, for an optimizer that writes both and then calls ``mark_written``.

        From here on the masters' ``grad`` is in the copies' dtype in steps of one micro-batch: the optimizer has to
        take either.
        """
        self._keeps_narrow = True
        for master in self._masters:
            master.grad_dtype = None  # any
        return dict(zip(self._masters, self._copies, strict=True))

    def mark_written(self) -> None:
        """The copies are what the masters are now; weights that are loaded later show by their versions."""
        self._is_stale, self._versions = False, self._sum_versions()

    def _before_forward(self, *_: Any) -> None:
        if self._backward is not None and torch._C._current_graph_task_id() == NO_BACKWARD:
            self._after_backward()  # it has failed, and left the copies where they were
        self._enter()
        if self._depth == 1:
            self._refresh()

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._leave()
        if self._depth == 0 and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._before_backward)

    def _before_backward(self, _: torch.Tensor) -> None:
        """Recomputation reads parameters again, so the copies are put back until autograd is through."""
        current = torch._C._current_graph_task_id()
        if self._backward == current:
            return  # another output of the same pass
        if self._backward is None:  # else it has failed, see above
            self._enter()
        self._backward = current
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._backward = None
        self._is_stale = not self.accumulates
        self._leave()

    def _add_to_master(self, master: nn.Parameter, copy: torch.Tensor) -> None:
        """Autograd's hook on a copy whose gradient is complete: moved to the master, mostly widened, and dropped."""
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if master.grad is None:
            alone = self._keeps_narrow and not self.accumulates
            master.grad = gradient if alone else gradient.to(master.dtype)
            return
        if master.grad.dtype != master.dtype:
            master.grad = master.grad.to(master.dtype)
        master.grad.add_(gradient)

    @torch.no_grad()
    def _refresh(self) -> None:
        versions = self._sum_versions()
        if self._is_stale or versions != self._versions:
            torch._foreach_copy_(self._copies, self._masters)
            self._is_stale, self._versions = False, versions

    def _sum_versions(self) -> int:
        return sum(master._version for master in self._masters)

    def _enter(self) -> None:
        if self._depth == 0:
            for parameters, name, _, copy in self._places:
                parameters[name] = copy
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            for parameters, name, master, _ in self._places:
                parameters[name] = master
