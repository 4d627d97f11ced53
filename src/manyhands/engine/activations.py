"""Activation checkpointing and offloading. Parameter names do not change.

Checkpointing: the backward pass recomputes all of a block, all but attention, or only cheap operations. Offloading:
what autograd saves in the blocks is copied to host memory during the forward pass and fetched back ahead, on two
streams ordered by events, so that neither direction waits on the host. With recomputed blocks only their inputs are
saved, and only these travel: the cheap, effective combination. Must not know the model's family, data or the optimizer.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from manyhands.core.limits import MAX_AHEAD_BYTES, MAX_LEAVING_BYTES, MAX_PASSING_BYTES, PASSING_TENSORS, PINNED_PIECE
from manyhands.model.structure import base_path, find_blocks, find_decoder, find_tower_blocks, is_multimodal
from manyhands.planner.layout import Checkpointing

LINEAR = {"aten::mm": 0, "aten::addmm": 1}  # which argument the inputs are; the weight (i, o) is the next one
MATMULS = {
    "manyhands::nf4_linear",
    "manyhands::nf4_low_rank_linear",
    "manyhands::low_rank_linear",
    "manyhands::fp8_matmul",
    "manyhands::multiply_groups",
    "manyhands::multiply_quantized",
    "manyhands::multiply_in_fp8",
    "manyhands::fp8_stacked",  # of weights, whose scales alone the backward pass takes
}
ATTENTION = {
    "manyhands::attend_in_parts",
    "manyhands::flash4_forward",
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
}
WIDEST = 16  # a matmul whose result is wider than so many times its inner dimension is cheaper to repeat than to keep


def checkpoint_blocks(model: nn.Module, modes: Sequence[Checkpointing], *, compiled: bool) -> None:
    """Keep less from the forward pass of training; gradients are bit-equal to keeping everything.

    ``modes`` has one entry a block, first to last (``Layout.checkpointing_by_layer``): ``full`` keeps the block's
    input; ``except_attention`` also the result of its attention, whose cost grows with a sample's length while its
    result does not; ``selective`` also those of its linear layers, so that norms, activations and sums are repeated;
    ``none`` keeps everything. ValueError for another number of entries.

    ``compiled``: whether ``compile_blocks`` follows. Then a checkpoint that keeps some results has to be *inside* the
    compiled region: around it, a compiled block is opaque, its operations are never seen, and everything would be
    recomputed. Inside, what is kept travels as marks on the nodes of the graph, which the partitioner of AOTAutograd
    obeys.
    ``torch._functorch.config.activation_memory_budget`` does something like it with a knapsack over guessed run times;
    it is one number for the process, knows nothing of operators of our own, and with symbolic sizes it works on hints,
    so that what is kept would depend on the first micro-batch.
    """
    blocks: list[Any] = list(find_blocks(model).values())
    for block, mode in zip(blocks, modes, strict=True):
        contexts = CONTEXTS.get(mode)
        if contexts is not None and compiled:
            # The instance's own ``forward``: the only place between FSDP2's hooks and the block's operations.
            block.forward = functools.partial(_checkpoint_in_training, block, block.forward, contexts)
        elif mode != "none":
            _recompute(block, contexts)


def checkpoint_towers(model: nn.Module, mode: Checkpointing) -> None:
    """The same for the repeated layers of trained vision towers, which are not compiled. A frozen one keeps nothing."""
    for block in find_tower_blocks(model).values() if mode != "none" else ():
        if any(parameter.requires_grad for parameter in block.parameters()):
            _recompute(block, CONTEXTS.get(mode))


def _recompute(block: Any, contexts: Any) -> None:
    """Checkpoint blocks through transformers' own interface."""
    options = {} if contexts is None else {"context_fn": contexts}
    block.gradient_checkpointing = True
    block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False, **options)


def selective_contexts() -> Any:
    """The two modes of ``torch.utils.checkpoint``, for the forward pass and for the recomputation."""
    return create_selective_checkpoint_contexts(_keep_matmuls)


def attention_contexts() -> Any:
    """The same, with nothing kept but the results of attention."""
    return create_selective_checkpoint_contexts(_keep_attention)


CONTEXTS: dict[Checkpointing, Any] = {"selective": selective_contexts, "except_attention": attention_contexts}
for _contexts in CONTEXTS.values():  # else torch keeps no compiled graph with them on the disk
    _contexts.cache_hash = f"{_contexts.__name__} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"


def _keep_attention(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition(".")[0]  # without the overload
    return CheckpointPolicy.MUST_SAVE if name in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_matmuls(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition(".")[0]  # without the overload
    if name in MATMULS or name in ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if name in LINEAR:
        inner, width = args[LINEAR[name] + 1].shape
        # The second factor of an adapter: a result as wide as the layer's own, for rank / inner of its work.
        return CheckpointPolicy.MUST_SAVE if width <= WIDEST * inner else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_in_training(block: nn.Module, inner: Any, contexts: Any, *args: Any, **kwargs: Any) -> Any:
    if not block.training or not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    return checkpoint(inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)


# Smaller tensors are not worth a copy; on a CPU, where nothing is gained, all are copied.
MIN_BYTES = {"cuda": 2**20, "cpu": 0}


def _may_pass(limit: int, size: int) -> int:
    """Bytes that may pass in one direction where tensors have ``size`` bytes."""
    return max(limit, min(PASSING_TENSORS * size, MAX_PASSING_BYTES))


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, (n,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


class SavedTensor:
    """One saved tensor: on the host in pieces, on the device while it leaves or is wanted. Lives as long as the graph
    needs it.
    """

    def __init__(self, place: int, tensor: torch.Tensor) -> None:
        self.place, self.size = place, tensor.nbytes  # where in the order of packing; bytes
        self.source = StorageWeakRef(tensor.untyped_storage())
        self.host: list[torch.Tensor] = []  # elements in pieces of ``PINNED_PIECE`` bytes, (n,)
        self.like: torch.Tensor | None = None  # on meta: its shape and strides
        self.device: torch.Tensor | None = None
        self.copied: torch.cuda.Event | None = None
        self.fetched: torch.cuda.Event | None = None


class ActivationStore:
    """``pack`` and ``unpack`` for ``torch.autograd.graph.saved_tensors_hooks``.

    What is on its way out is bounded by ``MAX_LEAVING_BYTES`` or ``PASSING_TENSORS`` of at most ``MAX_PASSING_BYTES``,
    whichever is more: past it the compute stream waits for the oldest copy. The backward pass asks in about the reverse
    order, so each request fetches the ones before it, up to ``MAX_AHEAD_BYTES`` or as many tensors. On a CPU the same
    bookkeeping runs with synchronous copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_blocks = 0  # done in this forward pass
        self.num_moved_blocks: int | None = None  # of the first ones; None: everything that is saved moves
        self._device = device
        self._min_bytes = MIN_BYTES[device.type]
        self._out: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[tuple[SavedTensor, torch.Tensor]] = deque()
        # Of this forward pass; valid while a graph needs the tensor, unchanged, and its memory has not been freed.
        self._known: weakref.WeakValueDictionary[Hashable, SavedTensor] = weakref.WeakValueDictionary()
        self._leaving_bytes = 0
        self._order: list[weakref.ref[SavedTensor]] = []
        self.num_packed_bytes = 0  # since the start

    def begin(self) -> None:
        """Before a forward pass: forget what no graph holds any more."""
        self._release(0)
        self._known.clear()
        self.num_blocks = 0
        alive = [saved for saved in (reference() for reference in self._order) if saved is not None]
        for place, saved in enumerate(alive):
            saved.place = place
        self._order = [weakref.ref(saved) for saved in alive]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedTensor:
        size = tensor.numel() * tensor.element_size()
        if type(tensor) is not torch.Tensor or tensor.device.type != self._device.type or size < self._min_bytes:
            return tensor
        if isinstance(tensor._base, nn.Parameter):
            return tensor  # a weight, transposed
        if self.num_moved_blocks is not None and self.num_blocks >= self.num_moved_blocks:
            self._release(0)  # the last that moved has had a block's time to leave
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._known.get(key)
        if known is not None and not known.source.expired():
            return known  # q, k and v save the same input, all blocks the same rotary angles
        self._release(_may_pass(MAX_LEAVING_BYTES, size) - size)
        saved = SavedTensor(len(self._order), tensor)
        self._copy_out(saved, tensor.detach())
        self._leaving.append((saved, tensor.detach()))
        self._known[key] = saved
        self._leaving_bytes += size
        self.num_packed_bytes += size
        self._order.append(weakref.ref(saved))
        return saved

    def unpack(self, packed: torch.Tensor | SavedTensor) -> torch.Tensor:
        if not isinstance(packed, SavedTensor):
            return packed
        for saved, tensor in self._leaving:
            saved.device = tensor  # the last ones are still here
        self._release(0)
        self._fetch(packed)
        ahead = 0
        for reference in reversed(self._order[: packed.place]):
            before = reference()
            if before is not None:
                if ahead and ahead + before.size > _may_pass(MAX_AHEAD_BYTES, before.size):
                    break
                ahead += before.size
                self._fetch(before)
        if packed.fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(packed.fetched)
        assert packed.device is not None
        return packed.device

    def _copy_out(self, saved: SavedTensor, tensor: torch.Tensor) -> None:
        saved.like = torch.empty_like(tensor, device="meta")
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            if saved.like.stride() != tensor.stride():  # there are gaps between its elements
                tensor = torch.empty_like(tensor).copy_(tensor)
            for piece in _flatten(tensor).split(PINNED_PIECE // tensor.element_size()):
                # torch keeps freed pinned blocks for the next step
                saved.host.append(torch.empty_like(piece, device="cpu", pin_memory=self._out is not None))
                saved.host[-1].copy_(piece, non_blocking=True)
        if self._out is not None:
            saved.copied = torch.cuda.Event()
            saved.copied.record(self._out)

    def _release(self, room: int) -> None:
        """Holds no more than ``room`` bytes of what leaves. The compute stream uses their memory again, so it waits for
        the copies.
        """
        while self._leaving and self._leaving_bytes > room:
            saved, _ = self._leaving.popleft()
            self._leaving_bytes -= saved.size
            if saved.copied is not None:
                torch.cuda.current_stream(self._device).wait_event(saved.copied)

    def _fetch(self, saved: SavedTensor) -> None:
        if saved.device is not None:
            return
        assert saved.like is not None
        # Allocated on the compute stream, which uses and frees it; what is queued there may still use the memory.
        saved.device = torch.empty_like(saved.like, device=self._device)
        if self._in is not None and saved.copied is not None:
            self._in.wait_stream(torch.cuda.current_stream(self._device))
            self._in.wait_event(saved.copied)
        with torch.cuda.stream(self._in):
            places = _flatten(saved.device).split(PINNED_PIECE // saved.device.element_size())
            for place, piece in zip(places, saved.host, strict=True):
                place.copy_(piece, non_blocking=True)
        if self._in is not None:
            saved.fetched = torch.cuda.Event()
            saved.fetched.record(self._in)


def repeat_input(store: ActivationStore, first: Any, second: Any) -> None:
    """Let ``second``, a block that is computed again, not keep its input: ``first``, the block before it, is computed
    once more in the backward pass to give it, from its own input. The numbers are the same: so are the graph and what
    is drawn for dropout.
    """
    run_first, run_second = first._gradient_checkpointing_func, second._gradient_checkpointing_func
    result: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def enter(compute: Any, x: torch.Tensor, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return run_first(compute, x, *args)
        packed, needs_gradient = store.pack(x.detach()), x.requires_grad
        drawn, (devices, drawn_there) = torch.get_rng_state(), get_device_states(x)

        def repeat() -> torch.Tensor:
            with torch.random.fork_rng(devices), torch.enable_grad():
                torch.set_rng_state(drawn)
                set_device_states(devices, drawn_there)
                out: torch.Tensor = compute(store.unpack(packed).detach().requires_grad_(needs_gradient), *args)
            return out.detach()

        result[:] = [(run_first(compute, x, *args), repeat)]
        return result[0][0]

    def leave(compute: Any, x: torch.Tensor, *args: Any) -> Any:
        out, repeat = result.pop() if result else (None, None)
        if out is not x:  # without gradients, or where something is added between blocks
            return run_second(compute, x, *args)
        address = x.data_ptr()

        def pack(tensor: torch.Tensor) -> Any:
            return repeat if tensor.data_ptr() == address else store.pack(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            return repeat() if packed is repeat else store.unpack(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run_second(compute, x, *args)

    first._gradient_checkpointing_func, second._gradient_checkpointing_func = enter, leave


def offload_activations(
    model: Any, device: torch.device, num_blocks: int | None = None, num_repeated: int = 0
) -> ActivationStore:
    """Let the base of ``model`` (embeddings, blocks, last norm; not the head) keep its activations in host memory; of a
    multimodal model its text decoder. With ``num_blocks`` those of so many of the first blocks, and the others theirs
    on the device. Of ``num_repeated`` pairs of blocks, the first ones, the second block's input is not kept.

    Weights stay: autograd saves parameters themselves or views of them, whether gathered by FSDP2, compiled or neither.
    """
    path = "" if is_multimodal(model.config) else base_path(model)
    base: nn.Module = model.get_submodule(path) if path else find_decoder(model)
    store = ActivationStore(device)
    entered: list[torch.autograd.graph.saved_tensors_hooks] = []

    def enter(*_: Any) -> None:
        if torch.is_grad_enabled():
            store.begin()
            entered.append(torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack))
            entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    blocks = [*find_blocks(model).values()]
    for index in range(num_repeated):
        repeat_input(store, blocks[2 * index], blocks[2 * index + 1])
    if num_blocks is not None and num_blocks < len(blocks):
        store.num_moved_blocks = num_blocks

        @torch.compiler.disable
        def count(*_: Any) -> None:
            store.num_blocks += 1

        for block in blocks:
            block.register_forward_hook(count)
    base.register_forward_pre_hook(enter)
    base.register_forward_hook(leave, always_call=True)
    return store
