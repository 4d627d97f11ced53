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
import torch.nn.functional as F
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from manyhands.model.checks import check_packing, pack_documents
from manyhands.model.loss import LossModel
from tests.support.families import measure
from tests.support.tiny import tiny_model

CPU = torch.device("cpu")
CONVOLUTION = ("causal_conv1d", "causal_conv1d_fn")
DELTA_RULE = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
FUSED_CONVOLUTION = ("fla.modules.causal_conv1d", "causal_conv1d")
GATED_NORM = ("fla.modules.norm.fused_norm_gate", "rms_norm_gated")
SCAN = ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
# in transformers' own code: the function that each takes the place of
TAKEN = {
    "qwen3_next": {"causal_conv1d_fn": CONVOLUTION, "torch_chunk_gated_delta_rule": DELTA_RULE},
    "bamba": {"causal_conv1d_fn": CONVOLUTION, "mamba2_chunk_scan": SCAN},
    "lfm2": {"causal_conv1d_fn": CONVOLUTION},
}
DELTA_NETS = {"qwen3_next": "qwen3_next", "qwen3_5_text": "qwen3_5", "olmo_hybrid": "olmo_hybrid"}  # and their modules
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


def fake_fla(kind: str, monkeypatch: pytest.MonkeyPatch, spoil: str = "") -> Calls:
    """``fla-core``'s kernels with their own signatures, computed by torch. ``spoil`` is the one that forgets where
    documents begin.
    """
    calls: Calls = []
    code = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    convolution, rule = (inspect.unwrap(getattr(code, f)) for f in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))

    def by_document(name: str, bounds: torch.Tensor, *tensors: torch.Tensor) -> Any:
        calls.append((name, bounds.tolist()))
        return zip(*(x.split([x.shape[1]] if spoil == name else split(None, bounds), 1) for x in tensors), strict=True)

    def causal_conv1d(x, weight=None, bias=None, activation=None, *, cu_seqlens):  # type: ignore
        parts = by_document("causal_conv1d", cu_seqlens, x)
        out = [convolution(part.mT, weight, bias, activation=activation).mT for (part,) in parts]
        return torch.cat(out, 1), None

    def chunk_gated_delta_rule(  # type: ignore
        q, k, v, g, beta, *, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        cu_seqlens, use_gate_in_kernel=False, A_log=None, dt_bias=None
    ):  # fmt: skip
        assert use_gate_in_kernel and use_beta_sigmoid_in_kernel
        g, beta = -A_log.float().exp() * F.softplus(g.float() + dt_bias), beta.sigmoid() * (1 + allow_neg_eigval)
        q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
        parts = by_document("chunk_gated_delta_rule", cu_seqlens, q, k, v, g, beta)
        norm = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return torch.cat([rule(q, k, v, g=g, beta=b, **norm)[0] for q, k, v, g, b in parts], 1), None

    def rms_norm_gated(x, g, weight, bias, activation="swish", eps=1e-6):  # type: ignore
        assert bias is None and activation == "swish"
        return F.rms_norm(x.float(), weight.shape, weight, eps) * F.silu(g.float())

    fakes = {FUSED_CONVOLUTION: causal_conv1d, DELTA_RULE: chunk_gated_delta_rule, GATED_NORM: rms_norm_gated}
    for (module, function), fake in fakes.items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        monkeypatch.setattr(sys.modules[module], function, fake, raising=False)
    return calls


@pytest.mark.parametrize("family", DELTA_NETS)
def test_delta_nets_need_fla_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient of a pack are those of transformers' forward pass of each document alone."""
    calls = fake_fla(DELTA_NETS[family], monkeypatch)
    row = measure(family)
    assert row.packed.within and row.padded.within and not row.refusal, row
    model = LossModel(tiny_model(family).train())
    assert str(model.states) == "packs, by their kernels' bounds"
    calls.clear()
    model.logits(pack_documents([torch.arange(n)[None] for n in (3, 1, 9)]))
    assert {name for name, _ in calls} == {"causal_conv1d", "chunk_gated_delta_rule"}
    assert all(bounds == [0, 3, 4, 13] for _, bounds in calls)


@pytest.mark.parametrize("spoil", ["causal_conv1d", "chunk_gated_delta_rule"])
def test_a_kernel_of_fla_that_leaks_is_found(spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla("qwen3_5", monkeypatch, spoil)
    model = LossModel(tiny_model("qwen3_5_text"))
    check_packing(model, model, CPU)
    assert "as rows (by their kernels logits deviate by" in str(model.states)


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
        ("qwen3_next", {}, "fla is not installed"),
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
