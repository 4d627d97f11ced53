"""Rates that were measured on this machine: kept by kind and number of GPUs, and found again."""

from __future__ import annotations

from pathlib import Path

from manyhands.facts.gpu_kinds import read_calibration, save_calibration
from manyhands.facts.types import GpuFacts

RATES = {
    "matmul_tflops": 660.0,
    "small_matmul_tflops": 200.0,
    "attention_tflops": 480.0,
    "memory_gb_s": 4200.0,
    "pcie_gb_s": 50.0,
    "launch_us": 3.0,
}


def gpus(*names: str) -> list[GpuFacts]:
    return [GpuFacts(index=i, name=name, memory_bytes=2**37, free_bytes=2**37) for i, name in enumerate(names)]


def test_rates_are_found_for_the_same_gpus_and_for_others_of_their_kind(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "calibration.json"
    assert read_calibration(gpus("A"), file) is None
    save_calibration("A", 1, RATES, file)
    save_calibration("A", 2, RATES | {"link_gb_s": 300.0}, file)
    one, two = read_calibration(gpus("A"), file), read_calibration(gpus("A", "A"), file)
    assert one is not None and two is not None
    assert (one.link_gb_s, two.link_gb_s) == (None, 300.0)
    assert read_calibration(gpus("A", "A", "A", "A"), file) == two
    assert read_calibration(gpus("B"), file) is None
    assert read_calibration(gpus("A", "B"), file) is None


def test_what_cannot_be_read_counts_as_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    for text in ("", "[1]", '{"1 x A": {"matmul_tflops": -1}}', '{"1 x A": 3}'):
        file.write_text(text)
        assert read_calibration(gpus("A"), file) is None
