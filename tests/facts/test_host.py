"""This machine, and CUDA_VISIBLE_DEVICES read as CUDA reads it."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from manyhands.facts import amd, host
from manyhands.facts.amd import AmdGpu
from manyhands.facts.host import read_host_facts
from manyhands.facts.types import GpuFacts
from manyhands.facts.visible import select_visible

UUIDS = ["GPU-aaaa-1", "GPU-bbbb-2", "GPU-bbcc-3", "GPU-dddd-4"]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("0,9,1", [0]),  # everything after a GPU that is not there is ignored
        ("0,-1,1", [0]),
        ("GPU-bbbb", [1]),
        ("gpu-dddd-4,GPU-aaaa", [3, 0]),
        ("GPU-bb", []),  # not one GPU
        ("1,1", [1]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(visible, chosen):
    assert select_visible(visible, UUIDS) == chosen


def test_hidden_gpus_are_not_there():
    facts = read_host_facts({"CUDA_VISIBLE_DEVICES": ""})
    assert facts.gpus == ()
    assert facts.num_cores >= 1
    assert 0 < facts.free_memory_bytes <= facts.memory_bytes


@pytest.mark.gpu
def test_gpus_are_seen_as_torch_sees_them():
    import torch

    gpus = read_host_facts().gpus
    assert [gpu.index for gpu in gpus] == list(range(torch.cuda.device_count()))
    for gpu in gpus:
        assert gpu.name == torch.cuda.get_device_name(gpu.index)
        assert gpu.compute_capability == torch.cuda.get_device_capability(gpu.index)
        assert gpu.memory_bytes >= torch.cuda.get_device_properties(gpu.index).total_memory


def nvml_lists(monkeypatch, name: str):
    """One GPU, whose memory the driver does not tell."""
    import pynvml

    def unsupported(handle: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: UUIDS[0],
        "nvmlDeviceGetName": lambda handle: name,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (12, 1),
        "nvmlDeviceGetMemoryInfo": unsupported,
    }
    for function, answer in answers.items():
        monkeypatch.setattr(pynvml, function, answer)


@pytest.mark.parametrize("name", ["NVIDIA GB10", "Orin (nvgpu)", "NVIDIA Thor"])
def test_a_gpu_without_memory_of_its_own_has_the_hosts(tmp_path, monkeypatch, name):
    nvml_lists(monkeypatch, name)
    torch_is(monkeypatch, "nvidia")
    monkeypatch.setattr(host, "memory_bytes", lambda: (128 * 2**30, 100 * 2**30))
    facts = read_host_facts({}, tmp_path)
    assert facts.unusable_gpus is None
    (gpu,) = facts.gpus
    assert (gpu.name, gpu.compute_capability) == (name, (12, 1))
    assert (gpu.memory_bytes, gpu.free_bytes) == (128 * 2**30, 100 * 2**30)


def test_a_card_whose_memory_is_not_told_cannot_be_used(tmp_path, monkeypatch):
    nvml_lists(monkeypatch, "NVIDIA H100 80GB HBM3")
    nodes(tmp_path, "nvidia0")
    found = read_host_facts({}, tmp_path)
    assert found.gpus == ()
    assert found.unusable_gpus is not None and "Not Supported" in found.unusable_gpus.why


def test_a_gpu_that_has_fallen_off_the_bus_is_named_and_the_others_are_numbered_anew(tmp_path, monkeypatch):
    import pynvml

    def name(handle: int) -> str:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return "NVIDIA H100 80GB HBM3"

    nvml_lists(monkeypatch, "")
    torch_is(monkeypatch, "nvidia")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: UUIDS[handle])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", name)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: types.SimpleNamespace(total=80 * 2**30, free=79 * 2**30)
    )
    facts = read_host_facts({}, tmp_path)
    assert [(gpu.index, gpu.uuid) for gpu in facts.gpus] == [(0, UUIDS[0]), (1, UUIDS[2])]
    assert facts.lost_gpus == ("GPU 1 does not answer (NVML: GPU is lost)",)
    without = read_host_facts({"CUDA_VISIBLE_DEVICES": f"{UUIDS[0]},{UUIDS[2]}"}, tmp_path)
    assert len(without.gpus) == 2 and not without.lost_gpus


# -- GPUs that are there and cannot be used


@pytest.fixture
def no_nvml(monkeypatch):
    import pynvml

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)


def torch_is(monkeypatch, build):
    monkeypatch.setattr(host, "torch_build", lambda: build)


def nodes(root, *names: str):
    for name in names:
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()


def add_render(root, vendor: str, number: int = 128, memory: int = 192 * 2**30):
    nodes(root, f"dri/renderD{number}")
    device = root / f"sys/class/drm/renderD{number}/device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor)
    (device / "mem_info_vram_total").write_text(str(memory))


def test_a_machine_without_gpus_lacks_nothing(tmp_path, no_nvml):
    nodes(tmp_path, "kfd", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "dri/card0")
    add_render(tmp_path, "0x1af4")
    add_render(tmp_path, "0x1002", 129, memory=2**29)  # graphics of a processor
    facts = read_host_facts({"PATH": ""}, tmp_path)
    assert facts.gpus == () and facts.unusable_gpus is None


def test_a_device_node_without_driver_is_said(tmp_path, no_nvml):
    nodes(tmp_path, "nvidia0", "nvidia1", "nvidiactl")
    unusable = read_host_facts({"PATH": ""}, tmp_path).unusable_gpus
    assert unusable is not None
    assert unusable.found == "2 NVIDIA GPUs (/dev/nvidia0 to /dev/nvidia1)"
    assert "NVML Shared Library Not Found" in unusable.why and "nvidia-smi" in unusable.fix


def test_nvidias_gpu_under_another_driver_is_said(tmp_path, no_nvml):
    add_render(tmp_path, "0x10de")
    unusable = read_host_facts({"PATH": ""}, tmp_path).unusable_gpus
    assert unusable is not None and unusable.found == "1 NVIDIA GPU (/dev/dri/renderD128)"


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_gpus_that_the_user_hides_are_no_error(tmp_path, no_nvml, hidden):
    nodes(tmp_path, "nvidia0")
    facts = read_host_facts({"PATH": "", "CUDA_VISIBLE_DEVICES": hidden}, tmp_path)
    assert facts.gpus == () and facts.unusable_gpus is None


def test_a_list_that_names_no_gpu_is_not_taken_for_hiding_them(tmp_path, monkeypatch):
    nodes(tmp_path, "nvidia0")
    monkeypatch.setattr(host, "_nvidia_gpus", lambda visible: host.NvidiaGpus())
    unusable = read_host_facts({"PATH": "", "CUDA_VISIBLE_DEVICES": "7"}, tmp_path).unusable_gpus
    assert unusable is not None and "CUDA_VISIBLE_DEVICES=7 names none" in unusable.why and "unset" in unusable.fix


@pytest.mark.parametrize(
    ("build", "why"), [("cpu", "built for the CPU alone"), ("amd", "built for ROCm"), (None, "torch is not installed")]
)
def test_a_torch_that_cannot_use_the_gpus_is_said(tmp_path, monkeypatch, build, why):
    gpu = GpuFacts(index=0, name="NVIDIA H200", memory_bytes=1, free_bytes=1, compute_capability=(9, 0))
    monkeypatch.setattr(host, "_nvidia_gpus", lambda visible: host.NvidiaGpus((gpu,) * 2))
    torch_is(monkeypatch, build)
    facts = read_host_facts({"PATH": ""}, tmp_path)
    assert facts.gpus == () and facts.unusable_gpus is not None
    assert facts.unusable_gpus.found == "2 × NVIDIA H200"
    assert why in facts.unusable_gpus.why and "built for CUDA" in facts.unusable_gpus.fix
    torch_is(monkeypatch, "nvidia")
    facts = read_host_facts({"PATH": ""}, tmp_path)
    assert facts.gpus == (gpu, gpu) and facts.unusable_gpus is None
    assert facts.kind is not None and facts.kind.name == "H200"


def test_amds_gpus_are_found_where_nvidia_has_none(tmp_path, no_nvml, monkeypatch):
    nodes(tmp_path, "kfd")
    monkeypatch.setattr(amd, "probe", lambda run: [AmdGpu("AMD Instinct MI300X", "gfx942", 192 * 2**30, 0)] * 2)
    torch_is(monkeypatch, "amd")
    facts = read_host_facts({"PATH": ""}, tmp_path)
    assert [gpu.vendor for gpu in facts.gpus] == ["amd", "amd"] and facts.unusable_gpus is None
    assert facts.kind is not None and facts.kind.name == "MI300X"


@pytest.mark.parametrize("build", ["amd", "cpu"])
def test_an_amd_gpu_without_rocms_driver_is_said(tmp_path, no_nvml, monkeypatch, build):
    add_render(tmp_path, "0x1002")
    torch_is(monkeypatch, build)
    unusable = read_host_facts({"PATH": ""}, tmp_path).unusable_gpus
    assert unusable is not None and unusable.found == "1 AMD GPU (/dev/dri/renderD128)"
    assert "no /dev/kfd" in unusable.why and "--device /dev/kfd" in unusable.fix
    assert ("torch is not built for ROCm" in unusable.why) == (build == "cpu")


def test_amd_gpus_that_may_not_be_opened_name_the_groups(tmp_path, no_nvml, monkeypatch):
    nodes(tmp_path, "kfd")
    add_render(tmp_path, "0x1002")
    monkeypatch.setattr(amd.os, "access", lambda path, mode: False)
    monkeypatch.setattr(amd, "probe", lambda run: [])
    torch_is(monkeypatch, "amd")
    unusable = read_host_facts({"PATH": ""}, tmp_path).unusable_gpus
    assert unusable is not None and "no permission to open /dev/kfd" in unusable.why and "render" in unusable.fix


def test_hidden_amd_gpus_are_no_error_and_a_wrong_list_is(tmp_path, no_nvml):
    nodes(tmp_path, "kfd")
    add_render(tmp_path, "0x1002")
    assert read_host_facts({"PATH": "", "HIP_VISIBLE_DEVICES": ""}, tmp_path).unusable_gpus is None
    unusable = read_host_facts({"PATH": "", "HIP_VISIBLE_DEVICES": "4"}, tmp_path).unusable_gpus
    assert unusable is not None and "HIP_VISIBLE_DEVICES=4 leaves none of 1" in unusable.why


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "nvidia"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n", "amd"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("__version__ = '2.11.0'\ncuda = '12.8'\nhip = None\n", "nvidia"),
    ],
)
def test_what_torch_is_built_for_is_read_without_importing_it(tmp_path, monkeypatch, text, build):
    (tmp_path / "version.py").write_text(text)
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: spec)
    assert host.torch_build() == build


def test_the_installed_torch_agrees_with_what_is_read_of_it():
    import torch

    expected = "amd" if torch.version.hip else "nvidia" if torch.version.cuda else "cpu"
    assert host.torch_build() == expected


def test_the_disk_of_a_run_that_removes_a_checkpoint_meanwhile_is_measured(tmp_path, monkeypatch):
    """As `manyhands plan` does beside a run."""
    for name in ("a", "b"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "shard").write_bytes(b"1234")
    scandir = os.scandir

    def look(path):
        if Path(path).name == "a":
            os.rename(path, tmp_path / "removed")
        return scandir(path)

    free = host.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: free)
    monkeypatch.setattr(os, "scandir", look)
    assert host.free_disk_bytes(tmp_path, "checkpoints") == free.free + 4
