"""What is wrong with a machine, from given facts: each fault is named, a healthy machine gives nothing."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from manyhands.cli import machine
from manyhands.facts import health
from manyhands.facts.gpu_kinds import describe_host, parse_gpus
from manyhands.facts.health import GpuHealth, HostHealth, judge_gpus, judge_host, judge_speed, judge_versions
from manyhands.facts.types import Figure
from manyhands.worker.health import judge_all

GIB = 2**30
WELL = HostHealth(
    name="gpu01",
    shared_bytes=64 * GIB,
    max_files=65536,
    max_locked_bytes=-1,
    free_disk_bytes=500 * GIB,
    has_infiniband=True,
    gpus=tuple(
        GpuHealth(index=i, name="H200", ecc_errors=0, pcie_width=16, pcie_max_width=16, nvlinks=18) for i in (0, 1)
    ),
    versions={"torch": "2.13.0"},
)


def gpu(**changes: object) -> tuple[GpuHealth, ...]:
    return (WELL.gpus[0], WELL.gpus[1].model_copy(update=changes))


def test_a_healthy_machine_gives_nothing() -> None:
    assert [*judge_host(WELL, 2)] == []
    assert [*judge_speed({"GPU 0": 700.0, "GPU 1": 690.0}, Figure(value=790, source="measured: x"), "H200")] == []
    assert [*judge_versions([WELL, WELL])] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared_bytes": 64 * 2**20}, "/dev/shm has 0.1 GiB free, and 2 ranks may need 0.5 GiB"),
        ({"max_files": 1024}, "a process may open 1,024 files"),
        ({"max_locked_bytes": 65536}, "InfiniBand needs more"),
        ({"free_disk_bytes": 5}, "0.0 GiB free where the run's folder is"),
        ({"gpus": gpu(ecc_errors=3)}, "GPU 1 (H200) has had 3 uncorrected memory errors"),
        ({"gpus": gpu(remap_failed=True)}, "GPU 1 (H200) could not replace broken memory rows"),
        ({"gpus": gpu(remap_pending=True)}, "will replace broken memory rows at its next reset"),
        ({"gpus": gpu(throttles=0x40 | 0x4, temperature_c=88)}, "GPU 1 (H200) runs slower at 88 °C: temperature"),
        ({"gpus": gpu(pcie_width=4)}, "GPU 1 (H200) uses 4 of 16 PCIe lanes"),
        ({"gpus": gpu(nvlinks=16)}, "GPU 1 (H200) has 16 active NVLinks, others have 18"),
    ],
)
def test_each_fault_is_named_alone_and_says_what_to_do(changes: dict[str, object], words: str) -> None:
    (finding,) = judge_host(WELL.model_copy(update=changes), 2)
    assert words in finding.text and finding.fix and finding.state != "ok"


def test_a_power_limit_and_unlimited_memory_are_usual() -> None:
    assert not [*judge_gpus(gpu(throttles=0x4 | 0x1))]
    assert not [
        *judge_host(WELL.model_copy(update={"max_files": -1, "has_infiniband": False, "shared_bytes": None}), 8)
    ]


def test_a_slow_gpu_is_named_and_all_slow_ones_beside_their_kind() -> None:
    rates = {"rank 0's GPU": 700.0, "rank 1's GPU": 600.0, "rank 2's GPU": 705.0}
    (slow,) = judge_speed(rates, None, "")
    assert "rank 1's GPU multiplies matrices at 600 TFLOP/s, the others at 700" in slow.text
    measured, sheet = Figure(value=790, source="measured: x"), Figure(value=790, source="datasheet: y")
    (finding,) = judge_speed({"GPU 0": 400.0}, measured, "H200")
    assert "400 TFLOP/s; H200: 790 (measured: x)" in finding.text
    assert not [*judge_speed({"GPU 0": 400.0}, sheet, "H200")], "a peak that no kernel reaches"


def test_of_several_machines_each_is_named() -> None:
    kind = describe_host(parse_gpus("2xH200")).kind
    other = WELL.model_copy(update={"name": "gpu02", "max_files": 99, "versions": {"torch": "2.12.0"}})
    found = [("gpu01", 700.0, WELL), ("gpu01", 700.0, None), ("gpu02", 700.0, other), ("gpu02", 300.0, None)]
    texts = [one.text for one in judge_all(found, kind, 1.0)]
    assert texts == [
        "gpu02: a process may open 99 files (RLIMIT_NOFILE)",
        "torch is not the same everywhere: 2.13.0 on gpu01; 2.12.0 on gpu02",
        "rank 3's GPU on gpu02 multiplies matrices at 300 TFLOP/s, the others at 700: every step waits for it",
    ]
    alone = [one.text for one in judge_all(found[:2], kind, 20.0)]
    assert len(alone) == 1 and "all-reduce between the GPUs runs at 20 GB/s; H200" in alone[0]


class FakeNvml(types.SimpleNamespace):
    """A library of one GPU that answers some questions."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS = 2

    def __init__(self) -> None:
        super().__init__(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
            nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
            nvmlDeviceGetRemappedRows=lambda handle: (1, 0, 1, 0),
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x40,
            nvmlDeviceGetTotalEccErrors=self._refuse,
            nvmlDeviceGetNvLinkState=lambda handle, link: link == 0,
        )

    def _refuse(self, *arguments: object) -> int:
        raise self.NVMLError


def test_what_a_driver_does_not_say_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml())
    (found,) = health.read_gpus({"CUDA_VISIBLE_DEVICES": "1"})
    assert (found.index, found.name, found.ecc_errors, found.pcie_width) == (1, "NVIDIA H200", None, None)
    assert found.remap_pending and not found.remap_failed and found.throttles == 0x40 and found.nvlinks == 1
    assert health.read_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1"}) == ()


def test_gpus_that_the_driver_does_not_find_or_calls_broken_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def find(uuid: str) -> str:
        if uuid == "GPU-gone":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def name(handle: str) -> str:
        if handle == "GPU-off":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if handle == "GPU-old":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return "NVIDIA H200"

    for function in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, function, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", find)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", name)
    monkeypatch.setattr(
        health,
        "_read_gpu",
        lambda nvml, index, handle: health.GpuHealth(index=0, name="", remap_failed=handle == "GPU-bad"),
    )
    found = health.find_lost(["GPU-well", "GPU-gone", "GPU-off", "GPU-old", "GPU-bad"])
    assert list(found) == ["GPU-gone", "GPU-off", "GPU-bad"]
    assert "GPU is lost" in found["GPU-off"] and "Not Found" in found["GPU-gone"] and "memory rows" in found["GPU-bad"]


@pytest.mark.parametrize(("action", "lost"), [(0, False), (1, True), (2, True), (4, False), (None, False)])
def test_a_gpu_that_the_driver_wants_reset_is_lost(
    monkeypatch: pytest.MonkeyPatch, action: int | None, lost: bool
) -> None:
    import pynvml

    def read(handle: str, fields: list[int]) -> list[types.SimpleNamespace]:
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        value = types.SimpleNamespace(uiVal=1 if action is None else action)
        return [types.SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED * (action is None), value=value)]

    for function in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, function, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA H200")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", read)
    monkeypatch.setattr(health, "_read_gpu", lambda nvml, index, handle: health.GpuHealth(index=0, name=""))
    found = health.find_lost(["GPU-a"])
    assert bool(found) is lost and all("the driver asks for a re" in why for why in found.values())


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    found = health.read_health("here", tmp_path / "not" / "there")
    assert found.free_disk_bytes and found.max_files and "torch" in found.versions


def test_the_doctor_shows_limits_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "read_health", lambda name, folder: WELL.model_copy(update={"max_files": 8}))
    (finding,) = machine._check_limits()
    assert finding.state == "warning" and "8 files" in finding.text and finding.fix == "ulimit -n 65536"
    facts = describe_host(parse_gpus("2xH200"))
    monkeypatch.setattr("manyhands.facts.host.read_host_facts", lambda: facts)
    for rates, words in (("[700.0, 699.0]", "700, 699 TFLOP/s"), ("[700.0, 400.0]", "GPU 1 multiplies")):
        probe = types.SimpleNamespace(returncode=0, stdout=f"RESULT {rates}\n", stderr="")
        monkeypatch.setattr(machine.subprocess, "run", lambda *given, probe=probe, **options: probe)
        assert words in " ".join(one.text for one in machine._check_speed())
