"""Packs by the own arguments of mixers' kernels, with fakes of the packages: chosen by what is installed and by its
signature, handed the documents' bounds, and left where the check finds that they leak.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from manyhands.model.checks import check_packing, pack_documents
from manyhands.model.loss import LossModel
from tests.support.families import measure
from tests.support.tiny import tiny_model

CPU = torch.device("cpu")
CONVOLUTION = ("causal_conv1d", "causal_conv1d_fn")
DELTA_RULE = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
SCAN = ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
# in transformers' own code: the function that each takes the place of
TAKEN = {
    "qwen3_next": {"causal_conv1d_fn": CONVOLUTION, "torch_chunk_gated_delta_rule": DELTA_RULE},
    "bamba": {"causal_conv1d_fn": CONVOLUTION, "mamba2_chunk_scan": SCAN},
    "lfm2": {"causal_conv1d_fn": CONVOLUTION},
}
Calls = list[tuple[str, Any]]


def split(numbers: torch.Tensor | None, bounds: torch.Tensor | None) -> list[int]:
    """Tokens of each document."""
    if bounds is not None:
        return bounds.diff().tolist()  # type: ignore[no-any-return]
    assert numbers is not None
    return torch.unique_consecutive(numbers[0], return_counts=True)[1].tolist()  # type: ignore[no-any-return]


def fake_kernels(plain: dict[tuple[str, str], Callable[..., Any]], calls: Calls, leaks: bool) -> dict[Any, Any]:
    """Functions with the signatures of the packages, that compute what transformers' own code does, each document by
    itself. ``leaks``: the last of a mixer's ignores documents.
    """

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):  # type: ignore
        calls.append(("causal_conv1d_fn", seq_idx))
        parts = x.split(split(seq_idx, None), 2) if seq_idx is not None else [x]
        return torch.cat([plain[CONVOLUTION](part, weight, bias, activation=activation) for part in parts], 2)

    def chunk_gated_delta_rule(  # type: ignore
        q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
    ):
        calls.append(("chunk_gated_delta_rule", cu_seqlens))
        sizes = split(None, cu_seqlens) if cu_seqlens is not None and not leaks else [q.shape[1]]
        parts = zip(*(tensor.split(sizes, 1) for tensor in (q, k, v, g, beta)), strict=True)
        norm = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        out = [plain[DELTA_RULE](q, k, v, g=g, beta=b, **norm)[0] for q, k, v, g, b in parts]
        return torch.cat(out, 1), None

    def mamba_chunk_scan_combined(  # type: ignore
        x, dt, A, B, C, chunk_size, D=None, dt_bias=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, **options
    ):
        assert cu_seqlens is None, "which resets no state"
        calls.append(("mamba_chunk_scan_combined", seq_idx))
        sizes = split(seq_idx, None) if seq_idx is not None and not leaks else [x.shape[1]]
        parts = zip(*(tensor.split(sizes, 1) for tensor in (x, dt, B, C)), strict=True)
        same = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
        return torch.cat([plain[SCAN](x, dt, A, b, c, **same) for x, dt, b, c in parts], 1)

    return {CONVOLUTION: causal_conv1d_fn, DELTA_RULE: chunk_gated_delta_rule, SCAN: mamba_chunk_scan_combined}


def install(
    monkeypatch: pytest.MonkeyPatch, family: str, *, leaks: bool = False, without: str = "", ignorant: str = ""
) -> Calls:
    """Fakes of the packages, but for the one called ``without``; ``ignorant``: its function has no parameter for
    documents. Returns what their functions were told of documents.
    """
    calls: Calls = []
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    plain = {place: inspect.unwrap(getattr(code, name)) for name, place in TAKEN[family].items()}
    fakes = fake_kernels(plain, calls, leaks)
    for name, (module, function) in TAKEN[family].items():
        package, *inner = module.split(".")
        if package == without:
            continue
        fake: Any = fakes[module, function]
        if package == ignorant:
            fake = lambda x, weight, bias=None, activation=None: plain[CONVOLUTION](  # noqa: E731
                x, weight, bias, activation=activation
            )
        parent = ModuleType(package)
        monkeypatch.setitem(sys.modules, package, parent)
        for index, part in enumerate(inner, 1):
            child = ModuleType(".".join([package, *inner[:index]]))
            monkeypatch.setitem(sys.modules, child.__name__, child)
            setattr(parent, part, child)
            parent = child
        setattr(parent, function, fake)
        monkeypatch.setattr(
            code, name, use_kernel_func_from_hub_with_fallback(function, package)(plain[module, function])
        )
    return calls


@pytest.mark.parametrize("family", TAKEN)
def test_kernels_are_told_where_documents_begin(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed trains as alone; every kernel of a mixer gets the bounds of all documents, and none is called in parts."""
    calls = install(monkeypatch, family)
    row = measure(family)
    assert row.packed.within and row.padded.within and not row.refusal, row
    model = LossModel(tiny_model(family).train())
    assert model.states and str(model.states) == "packs, by their kernels' bounds"
    calls.clear()
    model.logits(pack_documents([torch.arange(n)[None] for n in (3, 1, 9)]))
    expected = {"seq_idx": [0] * 3 + [1] + [2] * 9, "cu": [0, 3, 4, 13]}
    for name, found in calls:
        told = found.tolist() if name == "chunk_gated_delta_rule" else found[0].tolist()
        assert told == expected["cu" if name == "chunk_gated_delta_rule" else "seq_idx"], name
        assert found.dtype == (torch.int64 if name == "chunk_gated_delta_rule" else torch.int32)
    assert {name for name, _ in calls} == {name for _, name in TAKEN[family].values()}


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_a_kernel_that_leaks_is_found_and_documents_become_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, family, leaks=True)
    model = LossModel(tiny_model(family))
    assert model.states and not model.states.why_rows
    check_packing(model, model, CPU)
    assert "as rows (by their kernels logits deviate by" in str(model.states)


@pytest.mark.parametrize(
    ("family", "gap", "why"),
    [
        ("qwen3_next", {}, "causal_conv1d is not installed"),
        ("qwen3_next", {"without": "causal_conv1d"}, "causal_conv1d is not installed"),
        ("qwen3_next", {"without": "fla"}, "fla is not installed"),
        ("lfm2", {"ignorant": "causal_conv1d"}, "causal_conv1d_fn of causal_conv1d takes no seq_idx"),
        ("jamba", {}, "no kernel of JambaMambaMixer takes them"),
    ],
)
def test_what_is_installed_in_part_is_no_kernel_for_packs(
    family: str, gap: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gap:
        install(monkeypatch, family, **gap)  # type: ignore[arg-type]
    model = LossModel(tiny_model(family))
    assert str(model.states) == f"documents of a pack as rows ({why})"
    check_packing(model, model, CPU)


def test_a_kernel_that_raises_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton's do on a device that they do not know."""
    calls = install(monkeypatch, "lfm2")
    model = LossModel(tiny_model("lfm2"))
    rows = model.states
    assert rows and not rows.why_rows
    monkeypatch.setattr(
        type(next(m for m in model.modules() if type(m).__name__ == "Lfm2ShortConv")),
        "_compute_pack",
        lambda *_: (_ for _ in ()).throw(RuntimeError("no such device")),
    )
    check_packing(model, model, CPU)
    assert rows.why_rows == "their kernels fail: RuntimeError: no such device" and calls
