"""What a GPU can, asked once: torch gives AMD's gfx942 a compute capability of 9.4, which is no Hopper."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch

import manyhands
from manyhands.core.machine import GpuArchitecture
from manyhands.kernels.attention.flash4 import choose_packed
from manyhands.kernels.backend import architecture_of
from manyhands.kernels.fp8 import select

NVIDIA = ("has_bfloat16", "has_varlen_attention", "has_flash4", "is_hopper", "multiplies_fp8")


@pytest.mark.parametrize(
    ("architecture", "can"),
    [
        (GpuArchitecture("nvidia", (7, 0)), ()),
        (GpuArchitecture("nvidia", (8, 0)), ("has_bfloat16", "has_varlen_attention")),
        (GpuArchitecture("nvidia", (8, 9)), ("has_bfloat16", "has_varlen_attention", "multiplies_fp8")),
        (GpuArchitecture("nvidia", (9, 0)), NVIDIA),
        (GpuArchitecture("nvidia", (10, 0)), tuple(name for name in NVIDIA if name != "is_hopper")),
        (GpuArchitecture("nvidia", (12, 0)), ("has_bfloat16", "has_varlen_attention", "multiplies_fp8")),
        (GpuArchitecture("nvidia"), ("has_bfloat16", "has_varlen_attention", "multiplies_fp8")),  # a MIG slice
        (GpuArchitecture("amd", gfx="gfx906"), ()),
        (GpuArchitecture("amd", gfx="gfx1030"), ()),
        (GpuArchitecture("amd", gfx="gfx90a"), ("has_bfloat16",)),
        (GpuArchitecture("amd", gfx="gfx942"), ("has_bfloat16",)),
        (GpuArchitecture("amd", gfx="gfx950"), ("has_bfloat16",)),
        (GpuArchitecture("amd", gfx="gfx1100"), ("has_bfloat16",)),
    ],
)
def test_what_an_architecture_can(architecture, can):
    assert tuple(name for name in NVIDIA if getattr(architecture, name)) == can


@pytest.fixture
def mi300x(monkeypatch):
    """torch as it is built for ROCm, on an MI300X."""
    properties = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    caches = (choose_packed, select.has_scaled_mm, select.load_triton)
    for cache in caches:
        cache.cache_clear()
    yield torch.device("cuda", 0)
    for cache in caches:
        cache.cache_clear()


def test_no_kernel_takes_an_mi300x_for_a_hopper(mi300x, monkeypatch):
    def never(*given):
        raise AssertionError("a kernel for Hopper was tried")

    monkeypatch.setattr(select, "scaled_mm", never)
    monkeypatch.setattr(select, "triton_or", never)
    assert architecture_of(mi300x) == GpuArchitecture("amd", gfx="gfx942")
    assert not select.has_scaled_mm(mi300x)
    assert select.load_triton(mi300x) == (None, "gfx942 has no fp8 of this format")
    packed = choose_packed(mi300x, torch.bfloat16, 8, 2, 64)
    assert packed.name == "varlen" and packed.reason == "FlashAttention 4 needs an NVIDIA GPU"


def test_a_cpu_has_no_architecture():
    assert architecture_of(torch.device("cpu")) is None


def test_capabilities_are_compared_in_one_place_alone():
    source = Path(manyhands.__file__).parent
    asking = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"get_device_capability|capability(\[0\])? *(<|>|==|in \()|\.(major|minor)\b", path.read_text())
    }
    assert asking == {"core/machine.py", "kernels/backend.py"}
