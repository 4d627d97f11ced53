"""Several processes: the same bytes whatever their number, and nothing left of a preparation that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.tokenize import parallel as tokenize_parallel
from manyhands.data.tokenize.cache import UNFINISHED
from manyhands.data.tokenize.parallel import MIN_PARALLEL_BYTES, choose_num_processes
from manyhands.data.tokenize.prepare import prepare
from manyhands.data.tokenize.summary import PreparedData

NUM_FILES = 5
WITHOUT_IMPORTS = pytest.mark.usefixtures("forked")
PREPARE = """
import sys
from manyhands.config.schema import RunConfig
from manyhands.data.tokenize.prepare import prepare
print(prepare(RunConfig.model_validate_json(sys.argv[1]), sys.argv[2], lambda _: None, num_processes=2).digest)
"""


def row(number: int) -> dict:
    weight = {"weight": 0.5} if number % 11 == 5 else {}
    answer = {"role": "assistant", "content": f"It is {number + 1}." + " Indeed." * (number % 9), **weight}
    return {"messages": [{"role": "user", "content": f"What comes after {number}?"}, answer]}


@pytest.fixture
def rows_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(NUM_FILES):
        rows = [row(100 * number + index) for index in range(30 + 10 * number)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return folder


def read_store(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def prepare_by(
    numbers: Sequence[int], rows: Path, make_config: Callable[..., RunConfig], model: Path, **keys: Any
) -> tuple[PreparedData, list[str]]:
    """Prepares the rows by each number of processes, in caches of their own, into equal stores; returns the last facts
    and what was reported."""
    stores, said = [], []
    for number in numbers:
        config = make_config(rows, cache=str(rows.parent / f"cache-{number}"), **keys)
        facts = prepare(config, model, said.append, num_processes=number)
        stores.append(read_store(facts.folder))
    assert all(store == stores[0] for store in stores)
    return facts, said


@WITHOUT_IMPORTS
def test_the_store_does_not_depend_on_the_number_of_processes(rows_folder: Path, make_config, model_folder) -> None:
    facts, said = prepare_by((1, 2, 3), rows_folder, make_config, model_folder)
    assert (Path(facts.folder) / "weights.bin").is_file() and any(line.endswith("by 3 processes") for line in said)
    assert facts.num_samples + facts.num_validation_samples == 250


@WITHOUT_IMPORTS
def test_faults_are_the_same_and_in_order(
    rows_folder: Path, make_config, model_folder: Path, plain_folder: Path
) -> None:
    for number in (1, 3):
        with (rows_folder / f"{number}.jsonl").open("a") as file:
            file.write('{"messages": []}\n' * 15)
    told = []
    for number in (1, 3):
        with pytest.raises(UserError, match="30 rows cannot be trained") as caught:
            prepare(make_config(rows_folder), model_folder, lambda _: None, num_processes=number)
        told.append(str(caught.value))
    assert told[0] == told[1] and "1.jsonl:41:" in told[0] and "(29 more: 42, 43, 44, 45, ...)" in told[0]
    with (rows_folder / "2.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(UserError, match="1 line cannot be read"):
        prepare(make_config(rows_folder), model_folder, lambda _: None, num_processes=2)
    with pytest.raises(UserError, match="no chat template"):
        prepare(make_config(rows_folder), plain_folder, lambda _: None, num_processes=2)


def write_many(folder: Path, num_samples: int) -> Path:
    folder.mkdir()
    text = "".join(json.dumps(row(number)) + "\n" for number in range(num_samples))
    for number in range(4):
        (folder / f"{number}.jsonl").write_text(text)
    return folder


@pytest.fixture
def slow_rows(tmp_path: Path) -> Path:
    """Files that take some seconds each: time to kill somebody."""
    return write_many(tmp_path / "slow", 40_000)


@pytest.fixture
def start(make_config, model_folder: Path) -> Iterator[Callable[[Path], subprocess.Popen]]:
    started: list[subprocess.Popen] = []

    def begin(rows: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", PREPARE, make_config(rows).model_dump_json(), str(model_folder)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for_workers(process: subprocess.Popen, cache: Path) -> list[psutil.Process]:
    """[the process that loaded the tokenizer, those that it forked], once tokens are being written."""
    deadline = time.monotonic() + 280  # many others may want the cores
    while time.monotonic() < deadline and process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)
        if len(below) == 3 and any(path.stat().st_size for path in cache.glob("*/segments/*/tokens.bin")):
            return below
        time.sleep(0.05)
    pytest.fail("no tokens were written")


def wait_for_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


# The interrupt is in test_large_parts.py too; SIGTERM takes the way of SIGKILL.
@pytest.mark.ci
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_killed_preparation_leaves_no_process_and_no_half_cache(
    number: signal.Signals, slow_rows: Path, start, tmp_path: Path
) -> None:
    process = start(slow_rows)
    below = wait_for_workers(process, tmp_path / "cache")
    process.send_signal(number)
    wait_for_end(below)
    process.communicate(timeout=60)
    left = list((tmp_path / "cache").iterdir())
    assert all(path.name.startswith(UNFINISHED) for path in left)
    assert left == [] or number != signal.SIGINT  # which Python can clean up after


@pytest.mark.ci
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])  # 0: the one that forked the others
def test_a_killed_child_is_a_clear_error(victim: int, slow_rows: Path, start, tmp_path: Path) -> None:
    process = start(slow_rows)
    below = wait_for_workers(process, tmp_path / "cache")
    below[victim].send_signal(signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1 and "UserError: error: a process that tokenizes the data was killed" in told
    wait_for_end(below)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("num_cores", "free_gib", "expected"),
    [
        (8, 64, 8),
        (64, 64, 24),
        (8, 1.5, 4),
        (8, 1.125, 1),
        (8, 0.5, 1),
    ],  # 0.5 GiB for the first, 64 MiB for each; half of what is free
)
def test_as_many_processes_as_cores_and_memory_allow(
    num_cores: int, free_gib: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = int(free_gib * 2**30)
    monkeypatch.setattr(tokenize_parallel, "count_cores", lambda: num_cores)
    monkeypatch.setattr(tokenize_parallel, "memory_bytes", lambda: (2 * free, free))
    assert choose_num_processes(MIN_PARALLEL_BYTES - 1) == 1
    assert choose_num_processes(MIN_PARALLEL_BYTES) == choose_num_processes(1 << 40) == expected
