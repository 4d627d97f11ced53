"""Checkpoints that are written beside the training: what they hold, and what is left when they cannot be completed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from manyhands.checkpoint.background import BackgroundSave, BackgroundSaver, Status
from manyhands.checkpoint.tensors import checkpoint_tensors
from manyhands.core.errors import DISK_FULL, FAULT, UserError
from manyhands.core.progress import num_advances

CPU = torch.device("cpu")


class Case:
    """A model after a step, and what saves it."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 64) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.saver = BackgroundSaver(0, 1, CPU)
        self.before_update: Callable[[], None] = lambda: None
        self.step()

    def step(self) -> None:
        self.before_update()
        self.model(torch.ones(2, 3, dtype=self.model[0].weight.dtype)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        return checkpoint_tensors(self.model, self.optimizer)

    def begin(self, folder: Path, **keys: Any) -> BackgroundSave:
        tensors = self.tensors()
        assert self.saver.reserve(tensors) == ""
        save, self.before_update = self.saver.save(folder, tensors, {"step": 1}, manifest_extra={"plan": 1}, **keys)
        return save

    def save_now(self, folder: Path) -> None:
        save_checkpoint(
            folder, self.model, self.optimizer, {"step": 1}, rank=0, world_size=1, manifest_extra={"plan": 1}
        )


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    made.saver.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_files_are_those_of_a_save_that_training_waits_for(tmp_path: Path, dtype: torch.dtype) -> None:
    case = Case(dtype)
    case.save_now(tmp_path / "waited")
    save = case.begin(tmp_path / "beside")
    save.wait_ended()
    case.saver.close()
    assert save.status == Status.COMMITTED
    contents = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("waited", "beside")]
    assert contents[0] == contents[1] and "manifest.json" in contents[0]


def test_what_training_changes_after_staging_does_not_reach_the_file(tmp_path: Path, case: Case) -> None:
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    gate = threading.Event()
    case.saver.make_room(case.tensors())
    staging = case.saver._staging
    assert staging is not None
    write = staging.write
    staging.write = lambda *arguments: (gate.wait(60), write(*arguments))[1]  # type: ignore[method-assign]
    save = case.begin(tmp_path / "step-000001")
    case.step()
    gate.set()
    save.wait_ended()
    other = Case()
    load_checkpoint(tmp_path / "step-000001", other.model, other.optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.model.state_dict().items())
    assert not torch.equal(before["0.weight"], case.model[0].weight), "the step has changed it"
    assert all(float(state["step"]) == 1 for state in other.optimizer.state.values())


def test_host_memory_is_copied_beside_the_training_and_an_update_waits_for_it(tmp_path: Path, case: Case) -> None:
    """The copies are held up until the update is seen to wait."""
    begun, gate, updated = threading.Event(), threading.Event(), threading.Event()
    case.saver.make_room(case.tensors())
    staging = case.saver._staging
    assert staging is not None
    copy = staging.copy

    def slow_copy(*arguments: Any, **options: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        begun.set()
        gate.wait(60)
        copy(*arguments, **options)

    staging.copy = slow_copy  # type: ignore[method-assign]
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    save = case.begin(tmp_path / "step-000001")
    assert begun.wait(60), "the training goes on"
    update = threading.Thread(target=lambda: (case.step(), updated.set()))
    update.start()
    assert not updated.wait(0.2), "it would have torn the checkpoint"
    gate.set()
    update.join()
    save.wait_ended()
    other = Case()
    load_checkpoint(tmp_path / "step-000001", other.model, other.optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.model.state_dict().items())


def test_an_update_does_not_wait_for_copies_that_have_failed(tmp_path: Path, case: Case) -> None:
    case.saver.make_room(case.tensors())
    assert case.saver._staging is not None

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such memory")

    case.saver._staging.copy = fail  # type: ignore[method-assign]
    save = case.begin(tmp_path / "step-000001")
    case.step()
    with pytest.raises(RuntimeError, match="no such memory"):
        save.wait_ended()
    assert save.status == Status.FAILED and not (tmp_path / "step-000001").exists()


def test_a_second_save_uses_the_same_memory_and_process(tmp_path: Path, case: Case) -> None:
    case.begin(tmp_path / "step-000001").wait_ended()
    staging = case.saver._staging
    case.step()
    case.begin(tmp_path / "step-000002").wait_ended()
    assert case.saver._staging is staging
    other = Case()
    load_checkpoint(tmp_path / "step-000002", other.model, other.optimizer)
    assert torch.equal(other.model[1].weight, case.model[1].weight)


def test_a_writer_that_is_killed_leaves_the_checkpoint_before_and_is_named(tmp_path: Path, case: Case) -> None:
    case.begin(tmp_path / "step-000001").wait_ended()
    assert case.saver._staging is not None
    os.kill(case.saver._staging._process.pid, signal.SIGSTOP)  # in the middle of the next save
    case.step()
    save = case.begin(tmp_path / "step-000002")
    os.kill(case.saver._staging._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="process that writes checkpoints was killed by signal 9") as caught:
        save.wait_ended()
    assert caught.value.kind == FAULT, "what a restart may repair"
    assert "rank 0" in caught.value.why and "step-000002.tmp" in caught.value.where
    assert save.status == Status.FAILED and [step for step, _ in list_checkpoints(tmp_path)] == [1]


@pytest.mark.ci
def test_the_writer_ends_with_its_rank() -> None:
    """A rank that is killed cannot end it."""
    import subprocess
    import sys

    code = (
        "import os, torch\nfrom manyhands.checkpoint.staging import Staging\n"
        "staging = Staging(4096, torch.device('cpu'))\nstaging.make_room()\n"
        "print(staging._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    for _ in range(600):
        state = (
            Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] if Path(f"/proc/{pid}").exists() else "X"
        )
        if state in "XZ":
            return
        threading.Event().wait(0.05)
    pytest.fail("the writing process lives on")


def test_a_full_disk_is_the_same_error_as_ever(tmp_path: Path, case: Case) -> None:
    """Every write to /dev/full finds no space."""
    partial = tmp_path / "step-000001.tmp"
    partial.mkdir()
    (partial / "shard-00001-model-00001-of-00001.safetensors").symlink_to("/dev/full")
    save = case.begin(tmp_path / "step-000001")
    with pytest.raises(UserError, match="the disk is full") as caught:
        save.wait_ended()
    assert caught.value.kind == DISK_FULL and "shard-00001" in caught.value.where
    assert not list_checkpoints(tmp_path)


def test_a_disk_that_fills_up_in_the_middle_of_a_tensor_is_that_error(tmp_path: Path) -> None:
    """The process answers, though the failed write still holds a part of its mapping."""
    case = Case(width=4096)
    assert case.saver.reserve(case.tensors()) == "" and case.saver._staging is not None
    limit = 20_000  # bytes of a file: the first tensor has 49152
    resource.prlimit(case.saver._staging._process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    save = case.begin(tmp_path / "step-000001")
    with pytest.raises(UserError, match="cannot be written") as caught:
        save.wait_ended()
    case.saver.close()
    assert os.strerror(errno.EFBIG) in caught.value.why and "shard-00001" in caught.value.where


def test_it_is_under_way_until_what_follows_the_commit_is_done(tmp_path: Path, case: Case) -> None:
    """Copies and removals of two saves must not run at the same time."""
    begun, gate = threading.Event(), threading.Event()
    save = case.begin(tmp_path / "step-000001", after_commit=lambda moved: (begun.set(), gate.wait(60)))
    assert begun.wait(60)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1] and save.status == Status.WRITTEN
    gate.set()
    save.wait_ended()
    assert save.status == Status.COMMITTED and save.seconds > 0


@pytest.mark.parametrize("broken", ["subprocess.Popen", "map_shared"])
def test_what_cannot_be_started_or_mapped_is_a_reason_to_save_while_training_waits(
    case: Case, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EAGAIN if broken == "subprocess.Popen" else errno.ENOMEM, "no more")

    monkeypatch.setattr(f"manyhands.checkpoint.staging.{broken}", fail)
    assert "no more" in case.saver.reserve(case.tensors())


def test_an_unwritable_place_is_named(tmp_path: Path, case: Case) -> None:
    (tmp_path / "file").touch()
    save = case.begin(tmp_path / "file" / "step-000001")
    with pytest.raises(UserError, match="cannot be written"):
        save.wait_ended()


def test_only_whoever_waits_makes_progress(tmp_path: Path, case: Case) -> None:
    """What is written beside a training that hangs must not hide that it hangs."""
    seen = num_advances()
    save = case.begin(tmp_path / "step-000001")
    while save.status == Status.WRITING:
        threading.Event().wait(0.01)
    assert save._ended.wait(60) and num_advances() == seen
