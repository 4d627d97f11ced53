"""A disk that is full: refused before the first step where the plan can know, and else named once, in every place a
user looks.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import NO_VERIFY, Place, at_step

pytestmark = pytest.mark.timeout(1500)
FEW = (
    "batch.samples=40",
    "stop.max_steps=4",
    "checkpoint.every_steps=2",
    "evaluate.at_start=false",
    "evaluate.every_steps=0",
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> str:
    """An ``act``: writes until not one byte is free."""
    return (
        f"with open('{disk}/filler', 'wb', buffering=0) as file:\n"
        "    try:\n"
        "        for size in (2**20, 4096, 512, 1):\n"
        "            try:\n"
        "                while file.write(bytes(size)): pass\n"
        "            except OSError: pass\n"
        "    finally: pass"
    )


@pytest.mark.slow  # two runs; the test below has the message
def test_a_disk_that_fills_up_is_named_and_the_run_goes_on_once_there_is_room(place: Place, small_disk: Path) -> None:
    keys = (*FEW, f"output.dir={small_disk}")
    ended = place.train("filled", "--gpus", "1", *keys, plant=NO_VERIFY | at_step(3, fill(small_disk)))
    assert ended.code == 1 and "error: the disk is full" in ended.output, ended.output
    assert "No space left on device; " in ended.output and "fix: free some space" in ended.output
    assert ended.output.count("error: ") == 1 and "Traceback" not in ended.output
    status = json.loads((small_disk / "filled" / "status.json").read_text())
    assert (status["state"], status["reason"], status["cause"]) == ("failed", "the disk is full", "disk_full")

    (small_disk / "filler").unlink()
    again = place.train("filled", "--gpus", "1", *keys, plant=NO_VERIFY)
    assert again.code == 0 and "at step 2" in again.output, again.output
    rows = [json.loads(line) for line in (small_disk / "filled" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3, 4]


@pytest.mark.ci
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_checkpoint_that_finds_no_room_names_it_too(place: Place, small_disk: Path, asynchronous: str) -> None:
    plant = NO_VERIFY | {
        "manyhands.worker.checkpoints": "_tensors_to_stage = CheckpointHook._tensors_to_stage\n"
        "def _planted(self):\n"
        + "\n".join(f"    {line}" for line in fill(small_disk).splitlines())
        + "\n    return _tensors_to_stage(self)\n"
        "CheckpointHook._tensors_to_stage = _planted\n"
    }
    keys = (*FEW, f"checkpoint.asynchronous={asynchronous}", f"output.dir={small_disk}")
    ended = place.train("unsaved", "--gpus", "2", *keys, plant=plant)
    assert ended.code == 1 and ended.output.count("error: ") == 1 and "Traceback" not in ended.output, ended.output
    assert "error: the disk is full" in ended.output and "step-000002" in ended.output
    status = json.loads((small_disk / "unsaved" / "status.json").read_text())
    assert (status["state"], status["cause"]) == ("failed", "disk_full")


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(place: Place, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(20 * 2**20))
    for dry in ((), ("--dry-run",)):
        ended = place.train("refused", "--gpus", "1", *FEW, f"output.dir={small_disk}", *dry)
        assert ended.code == 2 and "error: not enough disk space for this run: it needs 16" in ended.output, (
            ended.output
        )
        assert "12.0 MiB are free" in ended.output and "choose an output.dir on a larger disk" in ended.output
    assert {path.name for path in small_disk.iterdir()} == {"other"}
