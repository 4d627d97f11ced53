"""What one rank gains where its shards lie in host memory: the next block's weights are copied while a block computes,
gradients are measured before they leave, and weights are updated in the backward pass where none has to wait.

FSDP2 does neither on a mesh of one rank. Its ``unshard`` skips the all-gather there and copies nothing: the copies are
queued by ``wait_for_unshard``, on the stream that computes, when a block's hooks ask for its weights. Prefetching, its
own or by ``set_modules_to_forward_prefetch``, calls only the first of the two (pytorch/torchtitan#2749; a patch is
pytorch/pytorch#178861: where a release that we require copies in ``unshard``, ``BlockPrefetch`` can go). Gradients do
leave beside the computation, in FSDP2's reduce-scatter stream. Must not know the model's family, data or the optimizer.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from manyhands.core.holding import is_full
from manyhands.core.limits import UPDATE_HELD_BYTES

PREFETCH = True  # False: FSDP2 alone, to compare with


class BlockPrefetch:
    """Copies the weights of the block that comes next, in forward and backward passes, while one computes.

    At most two blocks are unsharded at once. All copies run on one stream, and so does the allocation of what they
    write to: a block's memory is used again by the copy of another one only, which waits for everything that was
    queued on the compute stream before it, hence for the last use of that memory. Whatever a prefetch has missed,
    FSDP2's own hooks, which follow, still do. On a CPU the same calls copy at once.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """``blocks`` in the order of the forward pass; ``fully_shard`` has been applied to each of them."""
        self._blocks = blocks
        self._device = device
        on_gpu = device.type == "cuda"
        # Casts and copies on the device are short, but behind a matmul they would hold up the copy from the host.
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._ahead: int | None = None  # the block whose weights have been copied, or are on their way
        self._has_backward = [False] * len(blocks)  # of the last forward pass: frozen blocks may have none
        self._in_backward = False
        for index, block in enumerate(blocks):
            # Before FSDP2's hooks, which find the weights there; a tensor's hooks run in the order of registration.
            block.register_forward_pre_hook(partial(self._before_forward, index), prepend=True)
            block.register_forward_hook(partial(self._after_forward, index), prepend=True)

    @contextlib.contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Around a backward pass: the last block's weights come while the head's gradient is computed."""
        self._in_backward = True
        try:
            self._fetch_backward(len(self._blocks) - 1)
            yield
        finally:
            self._in_backward = False
            self.drop()

    def drop(self) -> None:
        """Frees what was fetched and not used: before weights change, or the block would compute with old ones."""
        if self._ahead is not None:
            self._unit(self._ahead).reshard()
            self._ahead = None

    @torch.compiler.disable
    def _before_forward(self, index: int, *_: Any) -> None:
        if self._in_backward:
            return  # computed again: the weights are there
        self._take(index)
        if index + 1 < len(self._blocks):
            self._fetch(index + 1)

    @torch.compiler.disable
    def _after_forward(self, index: int, _: nn.Module, __: Any, output: Any) -> None:
        if self._in_backward:
            return
        tensors = output if isinstance(output, (tuple, list)) else (output,)
        found = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        self._has_backward[index] = bool(found)
        for tensor in found:
            tensor.register_hook(partial(self._before_backward, index))

    def _before_backward(self, index: int, _: torch.Tensor) -> None:
        if self._in_backward and self._has_backward[index]:
            self._has_backward[index] = False  # one of several outputs: the others find the weights there
            self._take(index)
            self._fetch_backward(index - 1)

    def _fetch_backward(self, index: int) -> None:
        if index >= 0 and self._has_backward[index]:
            self._fetch(index)

    def _take(self, index: int) -> None:
        """What the compute stream does from now on may read the block's weights."""
        if self._ahead != index:
            self.drop()
            self._fetch(index)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._ahead = None

    def _fetch(self, index: int) -> None:
        """Starts to copy the block's weights, once the compute stream has done what it has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]  # none is the current one
            self._unit(index).unshard()
        self._ahead = index

    def _unit(self, index: int) -> FSDPModule:
        block = self._blocks[index]
        assert isinstance(block, FSDPModule)
        return block


class GradientNorms:
    """2-norms of gradients, each taken where it is computed, before FSDP2 moves it to host memory.

    Only for one rank, whose gradients are no sums over ranks, and where a step is one micro-batch: the norm of a sum
    does not follow from those of its parts, and the sum of several micro-batches is first there in host memory.
    """

    def __init__(self, model: nn.Module) -> None:
        """``model``: FSDP2 has been applied to it and to its blocks."""
        self._norms: dict[str, torch.Tensor | None] = {}  # by parameter; none: it has come more than once
        watch_gradients(model, self._add)

    def of(self, names: Iterable[str]) -> list[torch.Tensor] | None:
        """Norms of the gradients of these parameters, 0-d float64; none if one has no gradient, or a sum of several."""
        found = [self._norms.get(name) for name in names]
        norms = [norm for norm in found if norm is not None]
        return norms if len(norms) == len(found) else None

    def forget(self) -> None:
        """Gradients have been freed."""
        self._norms.clear()

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        if name in self._norms or parameter.grad is None:
            self._norms[name] = None
        else:
            self._norms[name] = torch._foreach_norm([parameter.grad], 2, dtype=torch.float64)[0]


@runtime_checkable
class PerParameterOptimizer(Protocol):
    """An optimizer that can update parameters one at a time."""

    def prepare_updates(self) -> None:
        """Once, before a step's first ``update``."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Updates one parameter on the current stream; ``step`` skips it and waits for the update."""


class BackwardUpdate:
    """Updates each weight during the backward pass, as soon as its gradient is complete. Copies of weights and
    optimizer states between host and device overlap with the computation, and gradients never leave the device.

    For one rank, steps of one micro-batch, and updates that do not depend on all gradients, as clipping does. Made
    after ``GradientNorms``, as it takes the gradients away.
    """

    def __init__(self, model: nn.Module, optimizer: PerParameterOptimizer, device: torch.device) -> None:
        """``model``: FSDP2 has been applied to it and to its blocks; its parameters are sharded now."""
        self.is_on = False
        self.updated: set[str] = set()  # since the last ``end``
        self._optimizer, self._device = optimizer, device
        self._shards = dict(model.named_parameters())
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        watch_gradients(model, self._take)

    def begin(self) -> None:
        """Before a step's only micro-batch, once the optimizer's groups have the step's learning rates."""
        self._optimizer.prepare_updates()
        self.is_on = True

    def end(self) -> None:
        """After the backward pass. The optimizer's ``step`` still waits for the last copies."""
        self._make_room(math.inf)
        self.is_on = False
        self.updated = set()

    @torch.no_grad()
    def _take(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if not self.is_on or gradient is None:
            return
        parameter.grad = None  # FSDP2 finds nothing to move
        self.updated.add(name)
        if self._stream is None:
            self._optimizer.update(self._shards[name], gradient)
            return
        self._make_room(gradient.nbytes)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._optimizer.update(self._shards[name], gradient)
            done = torch.cuda.Event()
            done.record()
        self._held.append((gradient, done))

    def _make_room(self, num_bytes: float) -> None:
        """Frees the oldest gradients until so many bytes more may be held. The compute stream, which uses their memory
        again, waits for their updates first.
        """
        while self._held and sum(gradient.nbytes for gradient, _ in self._held) + num_bytes > UPDATE_HELD_BYTES:
            _, done = self._held.popleft()
            torch.cuda.current_stream(self._device).wait_event(done)


def watch_gradients(model: nn.Module, call: Callable[[str, torch.Tensor], None]) -> None:
    """Calls ``call`` with name and unsharded parameter once a trained one's gradient is complete, where it is computed
    and before FSDP2 moves it. FSDP2 has been applied to ``model`` and to its blocks.
    """
    watched: set[str] = set()

    @torch.compiler.disable
    def watch(prefix: str, module: nn.Module, _: Any) -> None:
        if prefix in watched:
            return  # FSDP2 keeps an unsharded parameter, and frees no more than its memory
        watched.add(prefix)
        for name, parameter in module.named_parameters(prefix=prefix):
            if parameter.requires_grad and is_full(parameter):  # else it is another unit's
                parameter.register_post_accumulate_grad_hook(partial(call, name))

    units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    for name in units:  # after FSDP2's own hook, which puts the unsharded parameters in place
        model.get_submodule(name).register_forward_pre_hook(partial(watch, name))
