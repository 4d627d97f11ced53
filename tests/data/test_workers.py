"""Processes that collate: the same batches as the thread, for every stream; they end with us, and their death is
told.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.data.batch.batches import collate_here, iterate
from manyhands.data.batch.collate import BatchShape, BatchWorkers
from manyhands.data.batch.pack import lay_out_unpacked
from tests.data.fake_samples import open_deadly, open_drawn

CPU = torch.device("cpu")
SHAPE = BatchShape(packed=True, tile=16, longest=64)
UNITS = [np.array(rows) for rows in ([0, 5], [7], [], [11, 2, 3], [9, 9], [150], [199, 1])]


@pytest.fixture(scope="module")
def workers() -> Iterator[BatchWorkers]:
    two = BatchWorkers(open_drawn, 2)
    yield two
    pids = two.pids
    two.close()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert np.array_equal(value, theirs[name]) and getattr(value, "dtype", None) == getattr(
                theirs[name], "dtype", None
            )


@pytest.mark.parametrize("name", ["train", "validation"])
def test_batches_are_bit_equal_to_the_threads(workers: BatchWorkers, name: str) -> None:
    here = collate_here(open_drawn()[name], SHAPE)
    units = [unit % 50 for unit in UNITS] if name == "validation" else UNITS
    expected = list(here(units))
    assert ("loss_weights" in expected[0]) == (name == "validation")
    for _ in range(2):  # the same processes serve again
        assert_same(list(workers.collate(name, SHAPE, units)), expected)


def test_an_evaluation_amid_a_step_disturbs_neither(workers: BatchWorkers) -> None:
    sample_sets = open_drawn()
    train = workers.collate("train", SHAPE, UNITS)
    found = [next(train), next(train)]
    validation = workers.collate("validation", SHAPE, [np.array([4]), np.array([5]), np.array([6])])
    next(validation)
    validation.close()  # given up: what is still coming of it is thrown away
    again = list(workers.collate("validation", SHAPE, [np.array([1]), np.array([2])]))
    found += list(train)
    assert_same(found, list(collate_here(sample_sets["train"], SHAPE)(UNITS)))
    assert_same(again, list(collate_here(sample_sets["validation"], SHAPE)([np.array([1]), np.array([2])])))


def test_a_run_that_goes_on_from_any_step_gets_the_same_batches(workers: BatchWorkers) -> None:
    layouts = [lay_out_unpacked(np.arange(step, step + 6), 2, 2) for step in range(5)]

    def batches(first: int, collate_units: Any) -> list[list[dict[str, Any]]]:
        return [list(micro_batches) for _, micro_batches in iterate(layouts[first:], 1, CPU, collate_units)]

    whole = batches(0, collate_here(open_drawn()["train"], SHAPE))
    for first in (0, 3):
        with_processes = batches(first, lambda units: workers.collate("train", SHAPE, units))
        for found, expected in zip(with_processes, whole[first:], strict=True):
            assert_same(found, expected)


def test_what_collation_raises_is_raised_here_and_the_processes_live_on(workers: BatchWorkers) -> None:
    with pytest.raises(IndexError):
        list(workers.collate("train", SHAPE, [np.array([0]), np.array([1000])]))
    with pytest.raises(ValueError, match="do not fit"):
        list(workers.collate("train", BatchShape(packed=True, tokens=2), [np.array([0, 1])]))
    assert len(list(workers.collate("train", SHAPE, UNITS))) == len(UNITS)


def test_signals_to_the_whole_group_leave_them_working(workers: BatchWorkers) -> None:
    for pid in workers.pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert len(list(workers.collate("train", SHAPE, UNITS))) == len(UNITS)


def test_so_do_signals_before_they_have_imported_anything() -> None:
    workers = BatchWorkers(open_drawn, 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(workers.pids[0], number)
    assert len(list(workers.collate("train", SHAPE, UNITS))) == len(UNITS)
    workers.close()


def test_a_killed_process_is_a_clear_error() -> None:
    for when in ("amid a batch", "between two"):
        workers = BatchWorkers(open_deadly if when == "amid a batch" else open_drawn, 1)
        batches = iterate(
            [lay_out_unpacked(np.arange(6), 1, 1)] * 5,
            0,
            CPU,
            lambda units, w=workers: w.collate("train", SHAPE, units),
        )
        with pytest.raises(
            UserError, match=r"a process that prepares batches was killed by signal 9 \(SIGKILL\)"
        ) as caught:
            for index, (_, micro_batches) in enumerate(batches):
                if when == "between two" and index == 0:
                    os.kill(workers.pids[0], signal.SIGKILL)
                list(micro_batches)
        assert "data.workers" in caught.value.fix
        workers.close()


@pytest.mark.ci
def test_they_end_with_the_process_that_started_them() -> None:
    import subprocess
    import sys

    code = (
        "import sys, time\n"
        "from tests.data.fake_samples import open_drawn\n"
        "from manyhands.data.batch.collate import BatchWorkers\n"
        "workers = BatchWorkers(open_drawn, 2); print(*workers.pids, flush=True)\n"
        "assert 'torch' not in sys.modules\n"
        "time.sleep(60 if sys.argv[1] == 'killed' else 0)"
    )
    for how in ("killed", "returns"):
        with subprocess.Popen([sys.executable, "-c", code, how], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            if how == "killed":
                parent.kill()
            parent.wait(timeout=20)
        deadline = time.monotonic() + 10
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(psutil.pid_exists(pid) for pid in pids) and len(pids) == 2
