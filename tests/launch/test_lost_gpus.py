"""Which GPUs are lost after a fault: by the driver, by a test of the one that an error names, by what fails twice."""

from __future__ import annotations

import subprocess

import pytest

from manyhands.core.errors import FAULT, UserError
from manyhands.facts.types import GpuFacts
from manyhands.facts.xids import Xid
from manyhands.launch.restart import lost_gpus
from manyhands.launch.restart.lost_gpus import LaunchGpus, find_lost
from tests.launch.builders import make_config, make_plan

UUIDS = ["GPU-a", "GPU-b", "GPU-c"]
GIB = 2**30


def gpus(vendor: str = "nvidia") -> LaunchGpus:
    made = [
        GpuFacts(index=i, name="H100", memory_bytes=80 * GIB, free_bytes=79 * GIB, vendor=vendor, uuid=uuid)  # type: ignore[arg-type]
        for i, uuid in enumerate(UUIDS if vendor == "nvidia" else ("", "", ""))
    ]
    return LaunchGpus(3, tuple(made))


def fault(what: str, rank: int | None = 1) -> UserError:
    error = UserError(f"rank {rank} failed in stage 'train': RuntimeError: {what}", kind=FAULT)
    error.rank = rank
    return error


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """What the driver says, by UUID, and what a test of a rank's GPU finds."""
    says: dict[str, dict[str, str]] = {"driver": {}, "probe": {}}
    monkeypatch.setattr("manyhands.facts.health.find_lost", lambda uuids: says["driver"])
    monkeypatch.setattr(LaunchGpus, "_probe", lambda self, rank: says["probe"].get(str(rank), ""))
    return says


def test_a_gpu_that_the_driver_does_not_find_is_lost_whichever_rank_failed(machine) -> None:
    machine["driver"] = {"GPU-c": "NVML: GPU is lost"}
    assert gpus().find_lost(fault("Connection closed by peer", rank=0)) == {2: "NVML: GPU is lost"}


def test_a_gpu_that_an_error_names_is_tested(machine) -> None:
    launched = gpus()
    machine["probe"] = {"1": "it cannot multiply a matrix: CUDA error"}
    assert launched.find_lost(fault("the cat sat on the keyboard")) == {}, "no word of the device"
    named = fault("CUDA error: uncorrectable ECC error encountered", rank=0)
    assert launched.find_lost(named) == {}, "it answers: perhaps it was nothing"
    assert launched.find_lost(named) == {0: "it has failed 2 times in this launch"}
    machine["probe"] = {"0": "it cannot multiply a matrix: CUDA error"}
    assert gpus().find_lost(named) == {0: "it cannot multiply a matrix: CUDA error"}


def test_what_fails_twice_in_a_row_on_one_rank_is_tested_too(machine) -> None:
    launched, text = gpus(), "CUDA error: unspecified launch failure"
    machine["probe"] = {"1": "it has not multiplied a matrix within 90 s"}
    assert launched.find_lost(fault(text)) == {}
    assert launched.find_lost(fault(text, rank=0)) == {}
    assert launched.find_lost(fault(text)) == {}
    killed = fault("was killed (SIGKILL); the end of its log: attention: samples of one length by cudnn, fused AdamW")
    assert launched.find_lost(killed) == {}, "not by its GPU: no time is spent on it"
    assert launched.find_lost(fault(text)) == {1: "it has not multiplied a matrix within 90 s"}


def test_a_checkpoint_in_between_forgives_a_device_that_answers(machine) -> None:
    launched, named = gpus(), fault("CUDA error: uncorrectable ECC error encountered")
    assert [launched.find_lost(named, step) for step in (None, 100, 200)] == [{}, {}, {}]
    assert launched.find_lost(named, 200) == {1: "it has failed 2 times in this launch"}


@pytest.mark.parametrize("number", [48, 62, 64, 79, 95, 119, 120])
def test_a_gpu_that_needs_a_reset_by_the_drivers_report_is_lost_whichever_rank_failed(machine, number: int) -> None:
    [(rank, why)] = gpus().find_lost(fault("Connection closed by peer", rank=0), xids=[Xid("GPU-c", number)]).items()
    assert rank == 2 and why.startswith(f"Xid {number}, ")


@pytest.mark.parametrize("number", [13, 31, 43, 45, 61, 63, 92, 999])
def test_reports_of_a_program_or_of_what_was_mended_never_cost_a_gpu(machine, number: int) -> None:
    launched, xids = gpus(), [Xid("GPU-b", number)]
    machine["probe"] = {"1": "it would be lost if it were tested"}
    error = fault(f"an illegal memory access was encountered; the driver reports of its GPU: {xids[0]}")
    assert [launched.find_lost(error, xids=xids) for _ in range(4)] == [{}] * 4


def test_a_memory_error_that_was_confined_is_a_strike(machine) -> None:
    launched, xids, other = gpus(), [Xid("GPU-b", 94)], fault("Connection closed by peer", rank=0)
    assert launched.find_lost(other, xids=xids) == {}, "the GPU may be used again"
    assert launched.find_lost(other, xids=xids) == {1: "it has failed 2 times in this launch"}
    machine["probe"] = {"1": "it cannot multiply a matrix"}
    assert gpus().find_lost(other, xids=xids) == {1: "it cannot multiply a matrix"}


def test_a_link_fails_by_the_end_that_is_gone_if_one_is(machine) -> None:
    other, links = fault("NCCL error", rank=0), [Xid("GPU-a", 74), Xid("GPU-b", 74)]
    assert gpus().find_lost(other, xids=links[:1]) == {0: "Xid 74, an NVLink connection has failed"}
    assert list(gpus().find_lost(other, xids=[*links, Xid("GPU-c", 79)])) == [2]
    machine["driver"] = {"GPU-c": "NVML: GPU is lost"}
    assert list(gpus().find_lost(other, xids=links)) == [2]


def test_a_report_after_which_training_went_on_is_a_reason_to_test_the_gpu(machine) -> None:
    old, error = [Xid("GPU-b", 119, age_s=5000.0)], fault("was killed (SIGKILL)", rank=0)
    assert gpus().find_lost(error, xids=old, fresh_s=1860) == {}
    machine["probe"] = {"1": "it has not multiplied a matrix within 90 s"}
    assert list(gpus().find_lost(error, xids=old, fresh_s=1860)) == [1]


@pytest.mark.parametrize(
    ("code", "output", "error", "why"),
    [
        (0, "RESULT [700.0]", "", ""),
        (0, "RESULT []", "", "CUDA does not list it"),
        (1, "", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 32 MiB", ""),
        (
            1,
            "",
            "Traceback\nRuntimeError: CUDA error: unknown error",
            "cannot multiply a matrix: RuntimeError: CUDA error",
        ),
        (-11, "", "", "cannot multiply a matrix: exit code -11"),
    ],
)
def test_what_a_test_of_a_gpu_finds(
    monkeypatch: pytest.MonkeyPatch, code: int, output: str, error: str, why: str
) -> None:
    asked: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(env)
        return subprocess.CompletedProcess(command, code, output, error)

    monkeypatch.setattr(subprocess, "run", run)
    found = gpus()._probe(1)
    assert why in found and bool(found) == bool(why) and asked[0]["CUDA_VISIBLE_DEVICES"] == "GPU-b"


@pytest.mark.gpu
def test_a_gpu_that_is_well_is_not_lost() -> None:
    launched = LaunchGpus.of(make_plan(1, device="cuda"))
    assert launched.gpus and launched._ask_driver() == {} and launched._probe(0) == ""
    assert launched.find_lost(fault("CUDA error: uncorrectable ECC error encountered", rank=0)) == {}


@pytest.mark.parametrize(
    ("text", "is_of_device"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.", True),
        ("HIP error: no ROCm-capable device is detected", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: out of memory", False),
    ],
)
def test_errors_of_a_device_are_told_from_those_of_a_program(text: str, is_of_device: bool) -> None:
    assert (lost_gpus.DEVICE_ERROR.search(text) is not None) is is_of_device


def test_the_others_stay_visible_to_the_plan_and_the_workers() -> None:
    environ: dict[str, str] = {}
    gpus().hide({1: "lost"}, environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c"}
    environ = {"HIP_VISIBLE_DEVICES": "4,5,6", "CUDA_VISIBLE_DEVICES": "4,5,6"}
    gpus("amd").hide({0: "lost"}, environ)
    assert environ["HIP_VISIBLE_DEVICES"] == "5,6"


def test_where_fewer_are_not_allowed_the_error_names_the_gpu_and_how_to_allow_them(machine) -> None:
    machine["driver"] = {"GPU-b": "NVML: GPU is lost"}
    with pytest.raises(UserError) as refused:
        find_lost(gpus(), fault("Connection closed by peer", rank=0), make_config(), None)
    error = refused.value
    assert error.what == "GPU 1 (H100) is lost: NVML: GPU is lost" and "Connection closed by peer" in error.why
    assert error.where == "launch.min_gpus is not set: all are needed" and "2 GPUs left of 3" in error.why
    assert "start the same command again, which resumes" in error.fix and "launch.min_gpus=2" in error.fix
    found = find_lost(gpus(), fault("x", rank=0), make_config(**{"launch.min_gpus": 2}), None)
    assert found is not None and found.num_left == 2
    with pytest.raises(UserError, match="is lost"):
        find_lost(gpus(), fault("x", rank=0), make_config(**{"launch.min_gpus": 3}), None)
    machine["driver"] = {}
    assert find_lost(gpus(), fault("x", rank=0), make_config(), None) is None
