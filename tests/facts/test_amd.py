"""AMD's GPUs, from recorded output of its tools and from trees of files like the kernel's. No such machine ran this."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.facts import amd
from manyhands.facts.amd import find_amd_gpus, find_amd_nodes, gfx_of, read_amd_smi, read_rocm_smi, run_tool
from manyhands.facts.types import GpuFacts
from manyhands.facts.visible import hides_all, select_amd

MIB, GIB = 2**20, 2**30
MI300X_BYTES, IDLE_BYTES = 206141652992, 297771008  # as rocm-smi reports one at rest
RECORDED = Path(__file__).parent / "recorded"
UUIDS = ["GPU-aaaa000000000001", "GPU-bbbb000000000002", "GPU-cccc000000000003", "GPU-dddd000000000004"]


class Machine:
    """A folder with ``dev`` and ``sys`` as amdgpu makes them."""

    def __init__(self, root: Path) -> None:
        self.root, self.num_nodes, self.num_renders = root, 0, 0
        self.write("dev/kfd")
        self.add_node("cpu_cores_count 48\nsimd_count 0\ngfx_target_version 0\nvendor_id 0\ndrm_render_minor 0")

    def write(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        return file

    def add_node(self, properties: str) -> None:
        self.write(f"sys/class/kfd/kfd/topology/nodes/{self.num_nodes}/properties", properties)
        self.num_nodes += 1

    def add_gpu(
        self,
        version: int = 90402,
        memory: int = MI300X_BYTES,
        used: int = IDLE_BYTES,
        name: str = "AMD Instinct MI300X OAM",
        unique_id: int = 0x83F7DC91284879AB,
        in_container: bool = True,
    ) -> str:
        render = f"renderD{128 + self.num_renders}"
        self.add_node(
            f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\nvendor_id 4098\n"
            f"drm_render_minor {128 + self.num_renders}\nunique_id {unique_id}"
        )
        self.num_renders += 1
        self.add_render(render, "0x1002", in_container)
        self.write(f"sys/class/drm/{render}/device/mem_info_vram_total", str(memory))
        self.write(f"sys/class/drm/{render}/device/mem_info_vram_used", str(used))
        if name:
            self.write(f"sys/class/drm/{render}/device/product_name", name)
        return render

    def add_render(self, render: str, vendor: str, in_container: bool = True) -> None:
        self.write(f"sys/class/drm/{render}/device/vendor", vendor)
        if in_container:
            self.write(f"dev/dri/{render}")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def no_tool(command: Sequence[str], timeout_s: float) -> str:
    raise AssertionError(f"{command} was not to be started")


def replay(name: str, calls: list[str] | None = None):
    """amd-smi and rocm-smi answering what is recorded of ``name``."""

    def run(command: Sequence[str], timeout_s: float) -> str:
        if calls is not None:
            calls.append(" ".join(command))
        assert "--json" in command
        file = f"rocm-smi-{name}" if command[0] == "rocm-smi" else f"{name}-{command[1]}"
        return (RECORDED / f"{file}.json").read_text()

    return run


@pytest.fixture
def tools(tmp_path):
    """A PATH on which the named tools are; nobody starts them."""

    def make(*names: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).write_text("#!/bin/sh\nexit 1\n")
            (folder / name).chmod(0o755)
        return {"PATH": str(folder)}

    return make


# -- sources


def test_the_kernel_says_what_there_is(machine):
    machine.add_gpu(unique_id=1)
    machine.add_gpu(unique_id=2, used=5 * GIB)
    found = find_amd_gpus({"PATH": ""}, machine.root, no_tool)
    first, second = found.gpus
    assert first == GpuFacts(
        index=0,
        name="AMD Instinct MI300X OAM",
        memory_bytes=MI300X_BYTES,
        free_bytes=MI300X_BYTES - IDLE_BYTES,
        vendor="amd",
        gfx="gfx942",
    )
    assert second.index == 1 and second.free_bytes == MI300X_BYTES - 5 * GIB
    assert first.compute_capability is None and not first.architecture.has_flash4  # 9.4 of torch's is no Hopper
    assert first.has_bfloat16 and not first.architecture.multiplies_fp8


@pytest.mark.parametrize(
    ("version", "gfx"),
    [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110501, "gfx1151"), (110000, "gfx1100")],
)
def test_architectures_are_named_as_compilers_name_them(version, gfx):
    assert gfx_of(version) == gfx


def test_gpus_that_a_container_was_not_given_are_not_there(machine):
    machine.add_gpu(unique_id=1, in_container=False)
    machine.add_gpu(unique_id=2)
    assert len(find_amd_gpus({"PATH": ""}, machine.root, no_tool).gpus) == 1


def test_a_gpu_without_a_name_takes_that_of_its_kind(machine):
    machine.add_gpu(name="")
    (gpu,) = find_amd_gpus({"PATH": ""}, machine.root, no_tool).gpus
    assert gpu.name == "AMD Instinct MI300X"


def test_amd_smi_is_read_in_the_order_of_kfds_nodes():
    second, first = read_amd_smi(replay("mi300x"))
    assert (first.name, first.gfx) == ("AMD Instinct MI300X", "gfx942")
    assert first.memory_bytes == 196592 * MIB and first.used_bytes == 284 * MIB
    assert second.used_bytes == 1284 * MIB  # KFD's node 2, though amd-smi's GPU 1
    assert (first.uuid, second.uuid) == ("GPU-83f7dc91284879ab", "GPU-7412d1b26e1d8a7c")


def test_an_older_amd_smi_gives_lists_and_less():
    (gpu,) = read_amd_smi(replay("mi210"))
    assert (gpu.name, gpu.gfx, gpu.memory_bytes, gpu.used_bytes) == ("AMD Instinct MI210", "gfx90a", 65520 * MIB, 0)


def test_warnings_before_the_json_are_skipped():
    run = replay("mi300x")
    noisy = read_amd_smi(lambda *given: "WARNING: user is missing [render] {group}\n" + run(*given))
    assert noisy == read_amd_smi(run)


@pytest.mark.parametrize(
    ("name", "gfx", "memory", "number"), [("mi250x", "gfx90a", 68702699520, 2), ("rx7900", "gfx1100", 21458059264, 1)]
)
def test_rocm_smi_is_read_however_it_spells_its_keys(name, gfx, memory, number):
    found = read_rocm_smi(replay(name))
    assert len(found) == number
    assert {(gpu.gfx, gpu.memory_bytes) for gpu in found} == {(gfx, memory)}
    assert all(gpu.uuid.startswith("GPU-") for gpu in found) and 0 < found[0].used_bytes < GIB


def test_tools_are_asked_in_turn_and_only_if_the_kernel_says_nothing(tmp_path, tools):
    calls: list[str] = []
    found = find_amd_gpus(tools("amd-smi", "rocm-smi"), tmp_path, replay("mi300x", calls))
    assert len(found.gpus) == 2 and [call.split()[0] for call in calls] == ["amd-smi"] * 3
    calls.clear()
    assert len(find_amd_gpus(tools("rocm-smi"), tmp_path / "other", replay("mi250x", calls)).gpus) == 2
    machine = Machine(tmp_path / "kernel")
    machine.add_gpu()
    assert len(find_amd_gpus(tools("amd-smi"), machine.root, no_tool).gpus) == 1


def test_a_partition_of_which_nobody_says_the_memory_is_asked_of_torch(machine, tools):
    """sysfs and amd-smi know the first partition's memory alone: a half answer is none."""
    machine.add_gpu()
    machine.add_gpu()
    (machine.root / "sys/class/drm/renderD129/device/mem_info_vram_total").unlink()
    probed = [{"name": "AMD Instinct MI300X", "gfx": "gfx942:sramecc+", "total": 98 * GIB, "free": 97 * GIB}] * 2

    def run(command: Sequence[str], timeout_s: float) -> str:
        return json.dumps(probed) if "-c" in command else replay("partition")(command, timeout_s)

    found = find_amd_gpus(tools("amd-smi"), machine.root, run)
    assert [(gpu.index, gpu.gfx, gpu.memory_bytes) for gpu in found.gpus] == [
        (0, "gfx942", 98 * GIB),
        (1, "gfx942", 98 * GIB),
    ]
    assert "renderD129" in found.reasons[0] and "GPU 1" in found.reasons[1]
    assert find_amd_gpus(tools("amd-smi"), machine.root, run, probes=False).gpus == ()


def test_tools_that_fail_say_why(tools, tmp_path):
    def fail(command: Sequence[str], timeout_s: float) -> str:
        return run_tool(["/bin/sh", "-c", "echo no driver >&2; exit 3"], timeout_s)

    environ = tools("amd-smi", "rocm-smi")
    found = find_amd_gpus(environ, tmp_path, fail)
    assert found.gpus == () and found.reasons == ["amd-smi: no driver", "rocm-smi: no driver"]
    found = find_amd_gpus(environ, tmp_path, lambda command, timeout_s: "ERROR")
    assert found.reasons == ["amd-smi: its answer is not JSON", "rocm-smi: its answer is not JSON"]
    found = find_amd_gpus(environ, tmp_path, lambda command, timeout_s: '["gpu"]')
    assert len(found.reasons) == 2  # JSON of a form that is not known


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_devices_that_may_not_be_opened_are_said(machine):
    machine.add_gpu()
    (machine.root / "dev/kfd").chmod(0)
    assert find_amd_gpus({"PATH": ""}, machine.root, no_tool).reasons == ["sysfs: no permission to open /dev/kfd"]


def test_devices_that_may_not_be_opened_are_said_to_root_too(machine, monkeypatch):
    machine.add_gpu()
    monkeypatch.setattr(amd.os, "access", lambda path, mode: Path(path).name != "renderD128")
    (reason,) = find_amd_gpus({"PATH": ""}, machine.root, no_tool, probes=False).reasons
    assert reason == "sysfs: no permission to open /dev/dri/renderD128"


# -- integrated graphics


def test_integrated_graphics_and_other_vendors_are_no_gpus(machine):
    machine.add_gpu(version=100306, memory=512 * MIB, name="")  # a Ryzen's
    machine.add_gpu(version=110501, memory=96 * GIB, name="")  # one with much of the machine's memory
    machine.add_render("renderD140", "0x8086")
    machine.add_render("renderD141", "0x1af4")  # of a virtual machine
    assert find_amd_gpus({"PATH": ""}, machine.root, no_tool).gpus == ()
    assert find_amd_nodes(machine.root) == []


def test_integrated_graphics_after_a_gpu_are_left_out_and_before_it_are_an_error(tmp_path):
    after = Machine(tmp_path / "after")
    after.add_gpu(unique_id=1)
    after.add_gpu(version=100306, memory=512 * MIB, unique_id=2)
    assert [gpu.gfx for gpu in find_amd_gpus({"PATH": ""}, after.root, no_tool).gpus] == ["gfx942"]
    before = Machine(tmp_path / "before")
    before.add_gpu(version=100306, memory=512 * MIB, unique_id=2)
    before.add_gpu(unique_id=1)
    with pytest.raises(UserError, match="HIP_VISIBLE_DEVICES=1"):
        find_amd_gpus({"PATH": ""}, before.root, no_tool)
    hidden = find_amd_gpus({"PATH": "", "HIP_VISIBLE_DEVICES": "1"}, before.root, no_tool)
    assert [gpu.gfx for gpu in hidden.gpus] == ["gfx942"]


# -- variables


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),  # which HIP reads too
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1, 2", "CUDA_VISIBLE_DEVICES": "1,2"}, [1, 2]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, [2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),  # HIP numbers what is left anew
        ({"ROCR_VISIBLE_DEVICES": "GPU-cccc000000000003,0"}, [2, 0]),
        ({"ROCR_VISIBLE_DEVICES": "3,2,1", "HIP_VISIBLE_DEVICES": "2,0"}, [1, 3]),
        ({"GPU_DEVICE_ORDINAL": "1,2", "HIP_VISIBLE_DEVICES": "0"}, [1]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": "0,9,1"}, [0]),
    ],
)
def test_variables_are_applied_in_their_order(environ, chosen):
    assert select_amd(environ, UUIDS) == chosen


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "name different GPUs"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}, "HIP_VISIBLE_DEVICES names GPU 2, but only 2"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, "names GPU 1, but only 1 are left"),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, "are both set"),
    ],
)
def test_variables_that_contradict_each_other_are_an_error(environ, said):
    with pytest.raises(UserError) as caught:
        select_amd(environ, UUIDS)
    assert said in str(caught.value)
    assert all(f"{name}={value}" in str(caught.value) for name, value in environ.items())


def test_visible_gpus_keep_their_own_figures(machine):
    for number in range(3):
        machine.add_gpu(unique_id=number + 1, used=number * GIB)
    environ = {"PATH": "", "ROCR_VISIBLE_DEVICES": "0,2", "HIP_VISIBLE_DEVICES": "1"}
    found = find_amd_gpus(environ, machine.root, no_tool)
    assert [(gpu.index, gpu.memory_bytes - gpu.free_bytes) for gpu in found.gpus] == [(0, 2 * GIB)]
    assert found.num_hidden == 2


@pytest.mark.parametrize(
    ("environ", "hidden"),
    [
        ({}, False),
        ({"X": ""}, True),
        ({"X": "-1"}, True),
        ({"X": "none"}, True),
        ({"X": "0"}, False),
        ({"X": "9"}, False),
    ],
)
def test_only_an_empty_list_asks_for_no_gpu(environ, hidden):
    assert hides_all(environ, ("X",)) is hidden
