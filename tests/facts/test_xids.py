"""What the driver reports of GPUs while a run goes on is heard, and nothing of it ever fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pynvml
import pytest

from manyhands.facts.host import read_host_facts
from manyhands.facts.xids import MEANINGS, Xid, XidListener
from tests.support.nvml import fake_events

LIMIT_S = 60


def heard(listener: XidListener, is_enough: Callable[[tuple[Xid, ...]], bool], began: float = 0.0) -> list[tuple]:
    deadline = time.monotonic() + LIMIT_S
    while not is_enough(found := listener.since(began)):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return [(xid.uuid, xid.number) for xid in found]


def test_what_is_reported_of_a_runs_gpus_is_heard_and_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_events(monkeypatch, ["GPU-a", "GPU-b", "MIG-c"])
    with XidListener(["GPU-a", "GPU-b", "MIG-c", "GPU-gone", ""]) as listener:
        for number in (31, 31, 31, 79):
            fake.report("GPU-b", number)
        assert heard(listener, lambda found: len(found) == 2) == [("GPU-b", 31), ("GPU-b", 79)]
        assert fake.registered == ["GPU-a", "GPU-b"]
        later = time.monotonic()
        assert listener.since(later) == ()
        fake.fail(pynvml.NVML_ERROR_GPU_IS_LOST)  # what waiting says from then on
        fake.report("GPU-a", 63)
        assert heard(listener, bool, later) == [("GPU-a", 63)]
    assert fake.open == set()


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlEventSetCreate", "nvmlEventSetWait_v2"])
@pytest.mark.parametrize("error", [pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), OSError("x"), None])
def test_without_nvml_or_with_another_one_nothing_is_heard_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception | None
) -> None:
    fake = fake_events(monkeypatch, ["GPU-a"])

    def fail(*arguments: object) -> None:
        raise error or AssertionError

    if error is None:
        monkeypatch.delattr(pynvml, broken)  # an older library
    else:
        monkeypatch.setattr(pynvml, broken, fail)
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    with XidListener(["GPU-a"]) as listener:
        assert listener.ready.wait(LIMIT_S)
    assert listener.since(0) == () and not uncaught and fake.open == set()


def test_a_run_without_nvidias_gpus_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with XidListener([""]) as listener:
        assert not listener._thread.is_alive() and listener.since(0) == ()


def test_the_common_ones_are_explained_and_others_keep_their_number() -> None:
    common = {13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120}
    assert common <= set(MEANINGS)
    assert str(Xid("", 79)) == "Xid 79, it has fallen off the bus" and "Xid 999, see NVIDIA" in str(Xid("", 999))
    assert {number for number in common if Xid("", number).fault == "reset"} == {48, 62, 64, 79, 95, 119, 120}


# A kernel that writes to an address that is not mapped; ends with CUDA's error.
BAD_KERNEL = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
ptx = b'''.version 7.0
.target sm_70
.address_size 64
.visible .entry bad() {
    .reg .u64 %a;
    .reg .u32 %b;
    mov.u64 %a, 16;
    mov.u32 %b, 1;
    st.global.u32 [%a], %b;
    ret;
}'''
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuModuleLoadData(ctypes.byref(module), ptx) == 0
assert cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"bad") == 0
assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
print(cuda.cuCtxSynchronize())
"""


@pytest.mark.gpu
def test_a_real_drivers_report_of_a_kernel_that_writes_to_unmapped_memory_is_heard() -> None:
    uuid = read_host_facts().gpus[0].uuid
    with XidListener([uuid]) as listener:
        assert listener.ready.wait(LIMIT_S) and listener._thread.is_alive()
        done = subprocess.run([sys.executable, "-c", BAD_KERNEL], capture_output=True, text=True, check=False)
        assert done.stdout.strip() in ("700", "719"), done
        heard(listener, bool)
        assert all((xid.uuid, xid.fault) == (uuid, "program") for xid in listener.since(0))
