"""NVML's events as nvidia-ml-py gives them, of GPUs that are not there."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pynvml
import pytest

from manyhands.facts import xids


@dataclass
class FakeEvents:
    """``report("GPU-a", 79)`` is an Xid; an error code instead is what waiting for one raises. ``registered``: of which
    GPUs events are asked for; ``open``: of what NVML has handed out, what was not given back.
    """

    uuids: Sequence[str]
    before: Callable[[], None] = lambda: None  # each time that events are waited for
    registered: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    _reported: queue.SimpleQueue[tuple[str, int] | int] = field(default_factory=queue.SimpleQueue)

    def report(self, uuid: str, number: int) -> None:
        self._reported.put((uuid, number))

    def fail(self, code: int) -> None:
        self._reported.put(code)

    def _handle(self, uuid: str) -> ctypes._Pointer:
        if uuid not in self.uuids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return ctypes.cast(16 * (1 + list(self.uuids).index(uuid)), pynvml.c_nvmlDevice_t)

    def _register(self, handle: ctypes._Pointer, kinds: int, events: str) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError and events in self.open
        index = ctypes.cast(handle, ctypes.c_void_p).value // 16 - 1
        if self.uuids[index].startswith("MIG-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.registered.append(self.uuids[index])

    def _wait(self, events: str, milliseconds: int) -> pynvml.c_nvmlEventData_t:
        self.before()
        try:
            given = self._reported.get(timeout=milliseconds / 1000)
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        if isinstance(given, int):
            raise pynvml.NVMLError(given)
        return pynvml.c_nvmlEventData_t(device=self._handle(given[0]), eventData=given[1])


def fake_events(monkeypatch: pytest.MonkeyPatch, uuids: Sequence[str]) -> FakeEvents:
    fake = FakeEvents(uuids)

    def create() -> str:
        fake.open.add("events")
        return "events"

    answers = {
        "nvmlInit": lambda: fake.open.add("library"),
        "nvmlShutdown": lambda: fake.open.remove("library"),
        "nvmlEventSetCreate": create,
        "nvmlEventSetFree": fake.open.remove,
        "nvmlEventSetWait_v2": fake._wait,
        "nvmlDeviceRegisterEvents": fake._register,
        "nvmlDeviceGetHandleByUUID": fake._handle,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(xids, "WAIT_MS", 20)
    monkeypatch.setattr(xids, "RETRY_S", 0.02)
    return fake
