"""Several processes share tasks: each task once, and the first failure is everyone's."""

from __future__ import annotations

import os
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.infer.replicas import DeviceSlot, run_tasks
from tests.infer.copies import Squaring

TWO = [DeviceSlot(), DeviceSlot()]


def run(slots: list[DeviceSlot], tasks: list[Any]) -> list[Any]:
    left, results = list(tasks), []
    run_tasks(slots, Squaring, lambda capacity: left.pop(0) if left and capacity["pid"] else None, results.append)
    return results


def test_every_task_is_done_once_by_processes_of_their_own() -> None:
    results = run(TWO, list(range(20)))
    assert sorted(number for number, _, _ in results) == list(range(20))
    assert all(square == number**2 for number, square, _ in results)
    assert os.getpid() not in {pid for _, _, pid in results}


def test_a_copy_may_start_processes_as_vllm_does() -> None:
    assert [result[:2] for result in run(TWO, ["nest"])] == [("nest", 0)]


def test_a_single_copy_works_here() -> None:
    assert run([DeviceSlot()], [2, 3]) == [(2, 4, os.getpid()), (3, 9, os.getpid())]


@pytest.mark.parametrize(
    ("task", "error", "text"),
    [
        ("refuse", UserError, "not this one"),
        ("break", RuntimeError, "ZeroDivisionError: a bug"),
        ("die", UserError, "the process of the CPU has ended by SIGKILL"),
    ],
)
def test_what_ends_one_process_ends_all_and_is_said(task: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run(TWO, [1, 2, task, 3, 4])


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "2,3"), ("4,5,6,7", "6,7"), ("GPU-a, GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d")]
)
def test_a_library_that_takes_all_gpus_sees_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    DeviceSlot((2, 3)).hide_others()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
