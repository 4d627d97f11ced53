"""This machine, and CUDA_VISIBLE_DEVICES read as CUDA reads it."""

from __future__ import annotations

import pytest

from manyhands.facts.host import read_host_facts, select_visible

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
    host = read_host_facts({"CUDA_VISIBLE_DEVICES": ""})
    assert host.gpus == ()
    assert host.num_cores >= 1
    assert 0 < host.free_memory_bytes <= host.memory_bytes


@pytest.mark.gpu
def test_gpus_are_seen_as_torch_sees_them():
    import torch

    gpus = read_host_facts().gpus
    assert [gpu.index for gpu in gpus] == list(range(torch.cuda.device_count()))
    for gpu in gpus:
        assert gpu.name == torch.cuda.get_device_name(gpu.index)
        assert gpu.compute_capability == torch.cuda.get_device_capability(gpu.index)
        assert gpu.memory_bytes >= torch.cuda.get_device_properties(gpu.index).total_memory
