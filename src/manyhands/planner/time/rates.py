"""What the GPUs of a plan sustain: from a calibration of this machine, or from datasheets and the fitted shares of
``fitted.toml``. Pure but for reading that file once.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from typing import Literal

from manyhands.facts.gpu_kinds import load_kinds
from manyhands.facts.types import Calibration, GpuKind

REFERENCE_KIND = "H200"
UNKNOWN_KIND = {"bf16_tflops": 100.0, "memory_gb_s": 1000.0, "link_gb_s": 64.0}  # a GPU that is in no list
# To host memory and back, pinned, by generation of PCIe: an H200 was seen to move 50 of the fifth's 64 GB/s; of the
# fourth's 32 and the third's 16 as large a share is assumed.
PCIE_BYTES_S = {5: 50e9, 4: 25e9, 3: 12.5e9}
NODE_LINK_BYTES_S = 40e9  # a rank's share of the network between machines: InfiniBand of 400 Gbit/s, four fifths of it
LATENCY_S = 30e-6  # of one collective, within a machine
NODE_LATENCY_S = 80e-6  # and across machines


@dataclass(frozen=True)
class Fitted:
    """``fitted.toml``, which explains each value."""

    matmul_share: float
    burst_share: float
    fp8_share: float
    memory_share: float
    attention_share: float
    document_attention_share: float
    softmax_width: float
    attention_ramp: float
    link_share: float
    overlap_cost: float
    shard_copies: float
    host_layer_s: float
    host_step_s: float
    idle_step_s: float
    idle_micro_s: float


@dataclass(frozen=True)
class GpuRates:
    """FLOP/s and bytes/s that one GPU sustains. ``source``: ``datasheet`` or ``measured``."""

    matmul: float
    matmul_burst: float
    fp8: float
    attention: float
    document_attention: float
    memory: float
    link: float  # gathers and reductions, each rank, within a machine
    node_link: float
    pcie: float
    source: Literal["measured", "datasheet", "assumed"]
    launch: float = 1.0  # the host's time for a launch, in times of that where the constants were fitted


def peak_flops(kind: GpuKind) -> float:
    """Dense bfloat16 FLOP/s of the datasheet."""
    figure = kind.peak_tflops or kind.bf16_tflops
    return 1e12 * (float(figure.value) if figure is not None else UNKNOWN_KIND["bf16_tflops"])


def cpu_rates(num_cores: float) -> GpuRates:
    """Assumed, to compare layouts with each other: no step of a CPU is predicted from them."""
    flops = 3e10 * max(1.0, num_cores)
    return GpuRates(
        matmul=flops,
        matmul_burst=math.inf,  # no tiles
        fp8=flops / 4,
        attention=flops / 2,
        document_attention=flops / 2,
        memory=1e10,
        link=2e9,
        node_link=1e9,
        pcie=1e10,
        source="assumed",
    )


@lru_cache
def load_fitted() -> Fitted:
    table = tomllib.loads((files("manyhands.planner.time") / "fitted.toml").read_text(encoding="utf-8"))["fitted"]
    return Fitted(**{part.name: float(table[part.name]) for part in fields(Fitted)})


def rates_of(kind: GpuKind | None, calibration: Calibration | None, fitted: Fitted) -> GpuRates:
    """As measured on this machine, else from datasheets.

    Shares were fitted on GPUs of ``REFERENCE_KIND``, and a calibration there is the reference: what this machine
    measures over that, times what those GPUs are taken to sustain.
    """
    if calibration is None:
        return rates_of_kind(kind, fitted)
    base = rates_of_kind(next(each for each in load_kinds() if each.name == REFERENCE_KIND), fitted)
    own, reference = rates_of_kind(kind, fitted), load_reference()

    def ratio(name: str, otherwise: float = 1.0) -> float:
        measured = getattr(calibration, name)
        return float(measured) / reference[name] if measured is not None and name in reference else otherwise

    matmul, attention = ratio("matmul_tflops"), ratio("attention_tflops")
    return replace(
        own,
        matmul=base.matmul * matmul,
        matmul_burst=base.matmul_burst * ratio("small_matmul_tflops", matmul),
        fp8=base.fp8 * ratio("fp8_tflops", own.fp8 / base.fp8),
        attention=base.attention * attention,
        document_attention=base.document_attention * attention,
        memory=base.memory * ratio("memory_gb_s"),
        link=base.link * ratio("link_gb_s", own.link / base.link),
        pcie=base.pcie * ratio("pcie_gb_s"),
        launch=ratio("launch_us"),
        source="measured",
    )


@lru_cache
def load_reference() -> dict[str, float]:
    """``[reference]`` of ``fitted.toml``: what a calibration measured where the shares were fitted."""
    table = tomllib.loads((files("manyhands.planner.time") / "fitted.toml").read_text(encoding="utf-8"))["reference"]
    return {name: float(value) for name, value in table.items()}


def rates_of_kind(kind: GpuKind | None, fitted: Fitted) -> GpuRates:
    """Datasheet peaks times fitted shares. Links are datasheet figures of both directions together."""

    def figure(name: str) -> float:
        found = getattr(kind, name, None)
        return float(found.value) if found is not None else UNKNOWN_KIND.get(name, 0.0)

    bf16 = peak_flops(kind) if kind is not None else 1e12 * UNKNOWN_KIND["bf16_tflops"]
    fp8 = 1e12 * (float(kind.peak_fp8_tflops.value) if kind and kind.peak_fp8_tflops else figure("fp8_tflops"))
    return GpuRates(
        matmul=fitted.matmul_share * bf16,
        matmul_burst=fitted.burst_share * bf16,
        fp8=fitted.fp8_share * (fp8 or 2 * bf16),
        attention=fitted.attention_share * bf16,
        document_attention=fitted.document_attention_share * bf16,
        memory=fitted.memory_share * 1e9 * figure("memory_gb_s"),
        link=fitted.link_share * 1e9 * figure("link_gb_s") / 2,
        node_link=NODE_LINK_BYTES_S,
        pcie=PCIE_BYTES_S[kind.architecture.pcie_generation if kind is not None else 4],
        source="datasheet" if kind else "assumed",
    )
