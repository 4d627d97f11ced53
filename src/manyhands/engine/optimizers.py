"""The engine's optimizer: which kernels run it, and its states in host memory if the plan puts them there.

``StreamedOptimizer`` streams states to the device while the optimizer steps. The optimizer is torch's own: it is
stepped a chunk of parameters at a time, each with its states on the device, so every number is the one it would have
been. Full and sharded parameters alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands.config.schema import RunConfig
from manyhands.core.holding import first_index, local
from manyhands.core.limits import STATE_CHUNK_BYTES
from manyhands.engine.masters import ComputeCopy
from manyhands.kernels.adamw import FusedAdamW, choose_backend
from manyhands.kernels.backend import Backend
from manyhands.model.structure import find_blocks
from manyhands.planner.types import Plan
from manyhands.training.optimizer import make_optimizer


def make_engine_optimizer(
    model: nn.Module, plan: Plan, config: RunConfig, device: torch.device, copy: ComputeCopy | None
) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer of the plan; which kernels run AdamW, and why, or "".

    Fused AdamW runs where weights have a ``copy`` that computes, and for weights in bfloat16, which it streams itself.
    """
    optimizer, note = _make_optimizer(model, plan, config, device, copy)
    streams = plan.layout.offload == "optimizer" and not isinstance(optimizer, FusedAdamW)  # which does so by itself
    return (StreamedOptimizer(optimizer, device) if streams else optimizer), note


def _make_optimizer(
    model: nn.Module, plan: Plan, config: RunConfig, device: torch.device, copy: ComputeCopy | None
) -> tuple[torch.optim.Optimizer, str]:
    blocks, compute_dtype = list(find_blocks(model)), getattr(torch, plan.layout.compute_dtype)
    details = {"compute_dtype": compute_dtype, "parts": plan.rated_parts}
    make = partial(make_optimizer, model, config.optimizer, plan.learning_rate, blocks, **details)
    narrow = plan.layout.master_dtype == "bfloat16"
    if not narrow and (copy is None or not plan.fuse_optimizer or plan.layout.offload != "none"):
        return make(), ""
    backend = Backend("eager", "as configured") if config.kernels.optimizer == "reference" else choose_backend(device)
    why = f" ({backend.reason})" if backend.reason else ""
    if backend.name == "eager" and not narrow:
        return make(), f"optimizer: torch's own AdamW{why}"
    make_adamw = partial(FusedAdamW, backend=backend.name, seed=config.seed, first_index=first_index)
    if copy is not None:
        make_adamw = partial(make_adamw, copies=copy.share_copies(), written=copy.mark_written)
    if plan.layout.offload != "none":
        make_adamw = partial(make_adamw, stream_to=device)
    parts = "clipping, update and casts" if copy else "clipping and update"
    return make(make_adamw=make_adamw), f"optimizer: fused AdamW ({parts} in one kernel), {backend.name}{why}"


Chunk = list[list[torch.Tensor]]  # parameters stepped together, by group
States = dict[torch.Tensor, dict[str, torch.Tensor]]


class StreamedOptimizer(torch.optim.Optimizer):
    """An optimizer whose states lie in pinned host memory between two steps; checkpoints save and load them there.

    Shares groups and states with the optimizer inside. Scalars (``step``) stay where that keeps them. On a CPU the same
    chunks are stepped with synchronous copies, which gains nothing.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, device: torch.device, chunk_bytes: int = STATE_CHUNK_BYTES
    ) -> None:
        # Not the base class's constructor: the same objects, so that a learning rate or a loaded state is the inner
        # one's too.
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state
        self.inner, self._device, self._chunk_bytes = inner, device, chunk_bytes
        self._in: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._out: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def state_options(self) -> dict[str, Any]:
        """How a checkpoint is to make states that it loads into."""
        return {"device": torch.device("cpu"), "pin_memory": self._out is not None}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Fetch the next chunk ▸ step this one ▸ store it; the first step makes the states."""
        members: Chunk = [group["params"] for group in self.param_groups]
        chunks = split_parameters(members, self._chunk_bytes)
        storing: tuple[States, torch.cuda.Event | None] | None = None
        upcoming = self._fetch(chunks[0])
        try:
            for index, chunk in enumerate(chunks):
                (states, fetched), hosts = upcoming, self._host_states(chunk)
                if storing is not None:
                    self._wait_for(storing[1])
                    storing = None  # its memory is fetched into
                if index + 1 < len(chunks):
                    upcoming = self._fetch(chunks[index + 1])
                self._wait_for(fetched)
                self._step_chunk(chunk, states)
                storing = self._store(chunk, hosts)
        finally:
            for group, parameters in zip(self.param_groups, members, strict=True):
                group["params"] = parameters
        if self._out is not None:
            self._out.synchronize()  # a checkpoint reads the host's side

    def _step_chunk(self, chunk: Chunk, states: States) -> None:
        for group, parameters in zip(self.param_groups, chunk, strict=True):
            group["params"] = parameters
        for parameter, values in states.items():
            self.state[parameter].update(values)
        self.inner.step()

    def _host_states(self, chunk: Chunk) -> States:
        return {
            parameter: _arrays(self.state[parameter])
            for group in chunk
            for parameter in group
            if parameter in self.state
        }

    def _fetch(self, chunk: Chunk) -> tuple[States, torch.cuda.Event | None]:
        """Copies of the chunk's states on the device, on their way."""
        states = self._host_states(chunk)
        # Allocated on the compute stream, which frees them; what is queued there may still use the memory.
        copies = {
            p: {key: torch.empty_like(value, device=self._device) for key, value in values.items()}
            for p, values in states.items()
        }
        return copies, self._copy(states, copies, self._in)

    def _store(self, chunk: Chunk, hosts: States) -> tuple[States, torch.cuda.Event | None]:
        """Sends the stepped states back and puts the host's in their place; returns the device's, held until they are
        there.
        """
        stepped = self._host_states(chunk)
        for parameter, values in stepped.items():
            host = hosts.setdefault(parameter, {})
            for key, value in values.items():
                if key not in host:
                    host[key] = torch.empty_like(value, **self.state_options)
            self.state[parameter].update(host)
        return stepped, self._copy(stepped, hosts, self._out)

    def _copy(self, source: States, target: States, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # none is the current one
            for parameter, values in source.items():
                for key, value in values.items():
                    local(target[parameter][key]).copy_(local(value), non_blocking=True)
        if stream is None:
            return None
        done = torch.cuda.Event()
        done.record(stream)
        return done

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def split_parameters(members: Sequence[Sequence[torch.Tensor]], chunk_bytes: int) -> list[Chunk]:
    """Parameters of all groups in chunks of about so many bytes of this rank's parts, a larger one alone; at least one
    chunk.
    """
    chunks: list[Chunk] = []
    room = 0
    for index, parameter in ((index, each) for index, parameters in enumerate(members) for each in parameters):
        part = local(parameter)
        size = part.numel() * part.element_size()
        if not chunks or size > room:
            chunks.append([[] for _ in members])
            room = chunk_bytes
        chunks[-1][index].append(parameter)
        room -= size
    return chunks or [[[] for _ in members]]


def _arrays(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What is large: every tensor but scalars."""
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim > 0}
