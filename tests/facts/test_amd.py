"""AMD's GPUs, from recorded output of amd-smi and what torch answers. No such machine ran this."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.facts.amd import find_amd_gpus, find_amd_nodes, read_amd_smi, run_tool
from manyhands.facts.types import GpuFacts
from manyhands.facts.visible import hides_all, select_amd

MIB, GIB = 2**20, 2**30
RECORDED = Path(__file__).parent / "recorded"
UUIDS = ["GPU-aaaa000000000001", "GPU-bbbb000000000002", "GPU-cccc000000000003", "GPU-dddd000000000004"]


def replay(name: str):
    """amd-smi answering what is recorded of ``name``."""
    return lambda command, timeout_s: (RECORDED / f"{name}-{command[1]}.json").read_text()


def torch_says(*gpus: tuple[str, int]):
    """What the process with torch prints for GPUs of these architectures and GiB; amd-smi fails."""
    found = [{"name": f"AMD {gfx}", "gfx": gfx, "total": gib * GIB, "free": gib * GIB - 1} for gfx, gib in gpus]

    def run(command: Sequence[str], timeout_s: float) -> str:
        return json.dumps(found) if "-c" in command else replay("partition")(command, timeout_s)

    return run


@pytest.fixture
def machine(tmp_path):
    """A root with AMD's device."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    return tmp_path


@pytest.fixture
def tools(tmp_path):
    """A PATH on which amd-smi is; nobody starts it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/amd-smi").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/amd-smi").chmod(0o755)
    return {"PATH": str(tmp_path / "bin")}


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


def test_a_partition_of_which_amd_smi_lacks_the_memory_is_asked_of_torch(machine, tools):
    found = find_amd_gpus(tools, machine, torch_says(("gfx942:sramecc+", 98), ("gfx942:sramecc+", 98)))
    assert found.gpus[1] == GpuFacts(
        index=1, name="AMD gfx942:sramecc+", memory_bytes=98 * GIB, free_bytes=98 * GIB - 1, vendor="amd", gfx="gfx942"
    )
    assert found.gpus[0].compute_capability is None and not found.gpus[0].architecture.has_flash4  # 9.4 is no Hopper
    assert found.gpus[0].has_bfloat16 and not found.gpus[0].architecture.multiplies_fp8
    assert len(found.gpus) == 2 and "GPU 1" in found.reasons[0]
    assert find_amd_gpus(tools, machine, torch_says(("gfx942", 98)), probes=False).gpus == ()


def test_tools_that_fail_say_why(tools, tmp_path):
    def fail(command: Sequence[str], timeout_s: float) -> str:
        return run_tool(["/bin/sh", "-c", "echo no driver >&2; exit 3"], timeout_s)

    assert find_amd_gpus(tools, tmp_path, fail).reasons == ["amd-smi: no driver"]
    assert find_amd_gpus(tools, tmp_path, lambda *_: "ERROR").reasons == ["amd-smi: its answer is not JSON"]
    assert len(find_amd_gpus(tools, tmp_path, lambda *_: '["gpu"]').reasons) == 1  # JSON of an unknown form


def test_device_nodes_of_gpus(tmp_path):
    for number, (vendor, memory) in enumerate((("0x1002", GIB // 2), ("0x8086", 64 * GIB), ("0x1002", 192 * GIB))):
        device = tmp_path / f"sys/class/drm/renderD{number}/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor)
        (device / "mem_info_vram_total").write_text(str(memory))
        (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"dev/dri/renderD{number}").touch()
    assert find_amd_nodes(tmp_path) == ["/dev/dri/renderD2"], "neither a processor's graphics nor another vendor's"


def test_integrated_graphics_after_a_gpu_are_left_out_and_before_it_are_an_error(machine):
    after = find_amd_gpus({"PATH": ""}, machine, torch_says(("gfx942", 192), ("gfx1036", 2), ("gfx1151", 96)))
    assert [gpu.gfx for gpu in after.gpus] == ["gfx942"]
    with pytest.raises(UserError, match="HIP_VISIBLE_DEVICES=1"):
        find_amd_gpus({"PATH": ""}, machine, torch_says(("gfx1036", 2), ("gfx942", 192)))


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


def test_visible_gpus_keep_their_own_figures(tools, tmp_path):
    found = find_amd_gpus(tools | {"HIP_VISIBLE_DEVICES": "1"}, tmp_path, replay("mi300x"))
    assert [(gpu.index, gpu.memory_bytes - gpu.free_bytes) for gpu in found.gpus] == [(0, 284 * MIB)]
    assert found.num_hidden == 1


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
