"""Xids: errors that NVIDIA's driver reports of a GPU while programs run on it, and what each says of that GPU.

Listens through NVML in a thread of its own. Nothing here raises, and where there is no NVML nothing is heard.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from manyhands.facts.visible import open_nvml

WAIT_MS = 250  # until the thread looks whether it is still wanted
RETRY_S = 1.0  # NVML answers at once, with an error, after a GPU has fallen off the bus
MAX_KEPT = 1000  # a faulty kernel may cause one for each of its blocks

# program: of what ran on the GPU, which stays usable. memory: an error that was confined to one program; the GPU can be
# used again. link: of this GPU or of the one at the other end. reset: the GPU must not be used until it is reset.
Fault = Literal["program", "memory", "link", "reset", "other"]
SEVERITY: tuple[Fault, ...] = ("reset", "memory", "link", "program", "other")

# What NVIDIA's Xid catalog says of those that are seen in training.
MEANINGS: dict[int, tuple[Fault, str]] = {
    13: ("program", "a kernel did something illegal, such as an access out of bounds"),
    31: ("program", "a kernel accessed memory that is not mapped"),
    43: ("program", "the driver stopped the program's work after an error in it"),
    45: ("program", "the program's work was removed, because it ended or after another error"),
    48: ("reset", "an uncorrectable memory error (two bits)"),
    61: ("other", "its power controller reports an internal warning"),
    62: ("reset", "its power controller has halted"),
    63: ("other", "a broken row of its memory will be replaced at the next reset"),
    64: ("reset", "a broken row of its memory could not be noted for replacement"),
    74: ("link", "an NVLink connection has failed"),
    79: ("reset", "it has fallen off the bus"),
    92: ("other", "many memory errors, all of them corrected"),
    94: ("memory", "an uncorrectable memory error, confined to one program"),
    95: ("reset", "an uncorrectable memory error that was not confined to one program"),
    119: ("reset", "its firmware (GSP) does not answer"),
    120: ("reset", "its firmware (GSP) has failed"),
    140: ("reset", "an uncorrectable memory error that the driver could not handle"),
}
UNKNOWN: tuple[Fault, str] = ("other", "see NVIDIA's list of Xids")


class Xid(NamedTuple):
    """One report, by the UUID of its GPU."""

    uuid: str
    number: int
    age_s: float = 0.0

    @property
    def fault(self) -> Fault:
        return MEANINGS.get(self.number, UNKNOWN)[0]

    def __str__(self) -> str:
        return f"Xid {self.number}, {MEANINGS.get(self.number, UNKNOWN)[1]}"


class XidListener:
    """Within, what the driver reports of the GPUs ``uuids`` is kept. ``ready`` is set once it listens, or cannot."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.ready = threading.Event()
        self._uuids = [uuid for uuid in uuids if uuid]
        self._kept: deque[tuple[str, int, float]] = deque(maxlen=MAX_KEPT)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xids", daemon=True)

    def __enter__(self) -> XidListener:
        if self._uuids:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._uuids:
            self._thread.join(4 * WAIT_MS / 1000)  # a driver that hangs is not waited for

    def since(self, began: float) -> tuple[Xid, ...]:
        """Those reported since ``began`` (``time.monotonic``), in order; each number of a GPU once, the latest."""
        latest = {(uuid, number): at for uuid, number, at in list(self._kept) if at >= began}
        now = time.monotonic()
        return tuple(Xid(uuid, number, now - at) for (uuid, number), at in latest.items())

    def _run(self) -> None:
        # Of a driver or library that differs: no run ends for what is not heard.
        with contextlib.suppress(Exception), open_nvml() as nvml:
            self._listen(nvml)
        self.ready.set()

    def _listen(self, nvml: Any) -> None:
        events, by_address = nvml.nvmlEventSetCreate(), {}
        try:
            for uuid in self._uuids:
                with contextlib.suppress(nvml.NVMLError):  # a slice of a GPU has no events
                    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                    by_address[_address(handle)] = uuid
            self.ready.set()
            while by_address and not self._ended.is_set():
                try:
                    event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
                except nvml.NVMLError_Timeout:
                    continue
                except nvml.NVMLError:
                    self._ended.wait(RETRY_S)
                    continue
                # Its UUID could not be asked for any more where the GPU is gone.
                uuid = by_address.get(_address(event.device), "")
                self._kept.append((uuid, int(event.eventData), time.monotonic()))
        finally:
            nvml.nvmlEventSetFree(events)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
