"""Copies for ``test_replicas.py``: what a process does there, without torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from manyhands.core.errors import UserError
from manyhands.infer.replicas import DeviceSlot


class Squaring:
    """Squares numbers; some of them end it."""

    def __init__(self, slot: DeviceSlot) -> None:
        self.capacity = {"pid": os.getpid()}

    def run(self, task: Any) -> Any:
        if task == "refuse":
            raise UserError("not this one", fix="another")
        if task == "break":
            raise ZeroDivisionError("a bug")
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "nest":
            child = multiprocessing.get_context("fork").Process(target=abs, args=(1,))
            child.start()
            child.join()
            return task, child.exitcode, os.getpid()
        return task, task * task, os.getpid()
