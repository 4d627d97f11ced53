"""Causal attention over packs of documents by FlashAttention 4, as operators that torch.compile takes into one graph.

On an H200, 32 heads of 128 dimensions over 8 key-value heads, forward and backward: a long-tailed pack of 16,060
tokens takes 1.42 ms against 2.54 of torch's varlen (FlashAttention 2), 2 x 4,096 tokens 1.86 against 3.66; gradients
are as near to float32 (benchmarks/results/h200-flash-attention-4.jsonl). It comes with the package flash-attn-4,
which torch's own switch for it, ``activate_flash_attention_impl``, does not fit (4.0.0b36 with torch 2.11), so the
package is called here. Its backward pass is not public: ``bind`` holds all that is assumed of it, and
``choose_packed`` uses nothing that fails the self-test. Of long packs heads are computed a part at a time, as the
backward pass sums gradients in float32: 2 GiB of 131,072 tokens. Knows nothing of models, packing or batches.

Shapes: t positions of all documents, h query heads, g key-value heads (h a multiple of g), d dimensions a head, n
documents. ``cu_seq_lens`` (n + 1) int32 holds where documents begin, and t; empty documents are allowed. No document is
longer than ``max_length``, which is a bound. ``window``: positions that a query sees to its left, itself not counted;
-1 for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from manyhands.core.limits import count_head_parts
from manyhands.core.machine import GpuArchitecture
from manyhands.kernels.attention.dense import split_heads
from manyhands.kernels.attention.reference import ALLOWED, error_ratio
from manyhands.kernels.backend import Backend, architecture_of

PROBE_LENGTHS = (
    130,
    1,
    37,
    0,
    203,
    64,
    0,
    0,
)  # packs end with empty documents where the number of bounds is rounded up
PROBE_WINDOW = 33


@dataclass(frozen=True)
class Calls:
    """The package's two passes, with our arguments."""

    forward: Callable[
        ..., tuple[torch.Tensor, torch.Tensor]
    ]  # (q, k, v, cu_seq_lens, max_length, scale, window) -> out, lse
    backward: Callable[..., tuple[torch.Tensor, ...]]  # (gradient, q, k, v, out, lse, and the last four) -> dq, dk, dv


_calls: Calls | None = None  # one for the process: operators take tensors and numbers only


def attend_flash4(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scale: float | None,
    window: int,
) -> torch.Tensor:
    """Each document by itself, causal. ``query`` (t, h, d), ``key`` and ``value`` (t, g, d) -> (t, h, d).

    Runs only after ``choose_packed`` said flash4; ``RuntimeError`` otherwise. ``scale`` None is d ** -0.5.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return flash4_forward(query, key, value, cu_seq_lens, max_length, scale, window)[0]


# -- which kernel


@lru_cache
def choose_packed(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_groups: int, dim: int, window: int | None = None
) -> Backend:
    """FlashAttention 4 where it is installed, the device supports it and the self-test passes; else torch's own
    ``varlen``, with the reason.

    ``window``: of the model's sliding layers, if it has some; then both kinds of layers are tested. Takes some 6 s for
    the import and 5 s of compilation for each kind, on devices that can and where the package is installed; else
    nothing.
    """
    obstacle = find_obstacle(device.type, dtype, architecture_of(device))
    reason = obstacle or try_flash4(device, dtype, num_heads, num_groups, dim, with_window=bool(window))
    return Backend("varlen", reason) if reason else Backend("flash4")


def find_obstacle(device_type: str, dtype: torch.dtype, architecture: GpuArchitecture | None) -> str:
    """Why FlashAttention 4 is not even tried; empty where it is. ``architecture`` is None without a GPU."""
    if architecture is None:
        return f"the device is {device_type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention 4 does not compute in {str(dtype).removeprefix('torch.')}"
    if architecture.vendor != "nvidia":
        return "FlashAttention 4 needs an NVIDIA GPU"
    if not architecture.has_flash4:
        return f"FlashAttention 4 needs compute capability 9 or 10, this GPU has {architecture}"
    return ""


def import_interface() -> Any:
    """The package's module that holds both passes."""
    from flash_attn.cute import interface

    return interface


def try_flash4(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_groups: int,
    dim: int,
    *,
    with_window: bool,
    load: Callable[[], Any] = import_interface,
) -> str:
    """Import, bind and compare; empty if all went well, else why not. ``load`` gives the package's interface."""
    global _calls
    try:
        interface = load()
    except ModuleNotFoundError as error:
        if error.name in ("flash_attn", "flash_attn.cute"):
            return "flash-attn-4 is not installed"
        return f"flash-attn-4 cannot be imported: {error}"
    except Exception as error:  # its compiler looks for libraries and drivers, and has many ways to miss them
        return f"flash-attn-4 cannot be imported: {type(error).__name__}: {_first_line(error)}"
    calls = bind(interface)
    if isinstance(calls, str):
        return calls
    _calls = calls
    for window in (-1, PROBE_WINDOW) if with_window else (-1,):
        kind = f" with a window of {window}" if window >= 0 else ""
        try:
            worst = compare(device, dtype, num_heads, num_groups, dim, window)
        except Exception as error:  # assertions on shapes, errors of its compiler
            return f"FlashAttention 4 does not run here{kind}: {type(error).__name__}: {_first_line(error)}"
        if worst > ALLOWED:
            return f"FlashAttention 4 deviates{kind} by {worst:.1f} times the reference's error"
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:160]


def compare(device: torch.device, dtype: torch.dtype, num_heads: int, num_groups: int, dim: int, window: int) -> float:
    """Error of output and gradients on ragged documents, as a multiple of the reference's in ``dtype``."""
    cu_seq_lens = torch.tensor([0, *PROBE_LENGTHS]).cumsum(0).to(device, torch.int32)
    bound = 1 << (max(PROBE_LENGTHS) - 1).bit_length()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_flash4(query, key, value, cu_seq_lens, bound, None, window)

    return error_ratio(attend, PROBE_LENGTHS, (num_heads, num_groups), dim, window, dtype, device)


# -- the package's functions

# Arguments that are given by name. The second function is private: another version may change it.
FORWARD = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "window_size",
    "deterministic",
)
BACKWARD = (
    *("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "window_size_left", "window_size_right"),
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "deterministic"),
)


def bind(interface: Any) -> Calls | str:
    """The package's functions behind our arguments, or why they are not what is known here."""
    varlen, backward = (getattr(interface, name, None) for name in ("flash_attn_varlen_func", "_flash_attn_bwd"))
    if varlen is None or backward is None:
        return "this version of flash-attn-4 has other functions"
    for function, given in ((varlen, ("q", "k", "v", *FORWARD, "return_lse")), (backward, BACKWARD)):
        parameters = inspect.signature(function).parameters
        unknown = [name for name in given if name not in parameters]
        needed = [
            name
            for name, p in parameters.items()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if unknown or set(needed) - set(given):
            odd = ", ".join(unknown or sorted(set(needed) - set(given)))
            return f"this version of flash-attn-4 has another signature ({function.__name__}: {odd})"

    def shared(cu_seq_lens: torch.Tensor, max_length: int, scale: float) -> dict[str, Any]:
        return {
            "cu_seqlens_q": cu_seq_lens,
            "cu_seqlens_k": cu_seq_lens,
            "max_seqlen_q": max_length,
            "max_seqlen_k": max_length,
            "softmax_scale": scale,
            "causal": True,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    def forward_pass(q, k, v, cu_seq_lens, max_length, scale, window):  # type: ignore[no-untyped-def]
        sides = (window, 0) if window >= 0 else (None, None)  # -1 with a right side would be taken as a window
        with torch.no_grad():
            out, lse = varlen(q, k, v, **shared(cu_seq_lens, max_length, scale), window_size=sides, return_lse=True)[:2]
        return out, lse

    def backward_pass(  # type: ignore[no-untyped-def]
        gradient, q, k, v, out, lse, cu_seq_lens, max_length, scale, window
    ):
        left, right = (window, 0) if window >= 0 else (None, None)
        sides = {"window_size_left": left, "window_size_right": right}
        return backward(
            q=q, k=k, v=v, out=out, dout=gradient, lse=lse, **shared(cu_seq_lens, max_length, scale), **sides
        )[:3]

    return Calls(forward_pass, backward_pass)


def _bound() -> Calls:
    if _calls is None:
        raise RuntimeError("FlashAttention 4 was not chosen by choose_packed in this process")
    return _calls


# -- operators of our own: torch.compile does not look into them, and gradients pass through


@torch.library.custom_op(
    "manyhands::flash4_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seq_lens, SymInt max_length, float scale, SymInt window) "
    "-> (Tensor, Tensor)",
)
def flash4_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (t, h, d), and the logarithms of the softmax's denominators (h, t) float32, which have no gradient."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    num_parts, rest = _count_parts(q, k), (cu_seq_lens, max_length, scale, window)
    if num_parts == 1:
        out, lse = _bound().forward(q, k, v, *rest)
        return out.contiguous(), lse.contiguous()  # compiled code counts on the strides that the fake has
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    sums: list[torch.Tensor] = []
    for *part, place in split_heads(num_parts, q, k, v, out):
        found, lse = _bound().forward(*part, *rest)
        place.copy_(found)
        sums.append(lse)
        del found, lse  # before the next part's
    return out, torch.cat(sums)


@torch.library.custom_op(
    "manyhands::flash4_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seq_lens, "
    "SymInt max_length, float scale, SymInt window) -> (Tensor, Tensor, Tensor)",
)
def flash4_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q (t, h, d), k and v (t, g, d)."""
    tensors = [
        x.contiguous() for x in (gradient, q, k, v, out, lse)
    ]  # an expanded gradient would be one more compilation
    num_parts, rest = _count_parts(q, k), (cu_seq_lens, max_length, scale, window)
    if num_parts == 1:
        dq, dk, dv = _bound().backward(*tensors, *rest)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    parts = split_heads(num_parts, *tensors[:5], dq, dk, dv)
    for (*part, dq_part, dk_part, dv_part), lse_part in zip(parts, tensors[5].chunk(num_parts), strict=True):
        found = _bound().backward(*part, lse_part, *rest)
        for place, gradients in zip((dq_part, dk_part, dv_part), found, strict=True):
            place.copy_(gradients)
        del found, gradients  # before the next part's
    return dq, dk, dv


def _count_parts(q: torch.Tensor, k: torch.Tensor) -> int:
    num_tokens, num_heads, dim = q.shape
    return count_head_parts(num_tokens, num_heads, k.shape[1], dim, q.element_size())


@flash4_forward.register_fake
def _(q, k, v, cu_seq_lens, max_length, scale, window):  # type: ignore[no-untyped-def]
    num_tokens, num_heads, _ = q.shape
    return q.new_empty((num_tokens, num_heads, v.shape[2])), q.new_empty((num_heads, num_tokens), dtype=torch.float32)


@flash4_backward.register_fake
def _(gradient, q, k, v, out, lse, cu_seq_lens, max_length, scale, window):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seq_lens, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seq_lens)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *flash4_backward(gradient, *ctx.saved_tensors, *ctx.numbers), None, None, None, None


flash4_forward.register_autograd(_backward, setup_context=_keep_for_backward)
