"""Copies of checkpoints in a store: complete or not there, as many as are kept; and stores that fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from manyhands.checkpoint.manifest import copy_checkpoint, prune_copies
from manyhands.core.errors import UserError
from manyhands.core.remote import RemoteError, RemoteFolder
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.resume import fetch_run, folder_of, fresh_name, is_taken
from tests.config.builders import config

URL = "memory://bucket/runs"


@pytest.fixture
def remote() -> Iterator[RemoteFolder]:
    yield RemoteFolder(f"{URL}/r")
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def asked_in(folder: Path, **keys):
    return config(name="r", output__dir=str(folder), checkpoint__copy_to=URL, **keys)


def local_run(folder: Path, steps: tuple[int, ...] = (2,), **keys) -> RunFolder:
    """A run's folder as far as copies are concerned."""
    run = RunFolder(folder / "r")
    run.create()
    run.write_config(asked_in(folder, **keys))
    (run.plans / "001.json").write_text("{}")
    for step in steps:
        checkpoint = run.checkpoints / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "zz.safetensors").write_bytes(bytes([step % 256]) * 10)
        (checkpoint / "manifest.json").write_text(json.dumps({"files": {"zz.safetensors": {}}}))
    return run


def copy(remote: RemoteFolder, run: RunFolder, moved=lambda num_bytes: None) -> None:
    for checkpoint in sorted(run.checkpoints.iterdir()):
        copy_checkpoint(remote, checkpoint, [run.run_json, run.plans / "001.json"], run.path, moved)


def test_the_manifest_is_copied_last(remote: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    put = remote.put
    monkeypatch.setattr(remote, "put", lambda file, name, moved: (names.append(name), put(file, name, moved))[1])
    sizes: list[int] = []
    copy(remote, local_run(tmp_path), sizes.append)
    assert names[-2:] == ["checkpoints/step-000002/zz.safetensors", "checkpoints/step-000002/manifest.json"]
    assert names[:2] == ["run.json", "plans/001.json"] and sum(sizes) > 10


def test_as_many_copies_are_kept_as_checkpoints(remote: RemoteFolder, tmp_path: Path) -> None:
    copy(remote, local_run(tmp_path, (2, 4, 6, 8)))
    prune_copies(remote, 2, ["step-000002"])
    assert remote.list("checkpoints") == ["step-000002", "step-000006", "step-000008"]
    assert remote.read("checkpoints/step-000004/manifest.json") is None and remote.list("nothing") == []


def test_incomplete_copies_do_not_count_and_are_removed_once_a_newer_one_is_complete(
    remote: RemoteFolder, tmp_path: Path
) -> None:
    copy(remote, local_run(tmp_path, (2, 4, 6)))
    (tmp_path / "file").write_text("of a copy that was cut off")
    for step in (5, 7):
        remote.put(tmp_path / "file", f"checkpoints/step-00000{step}/zz.safetensors")
    remote.put(tmp_path / "file", "checkpoints/notes/mine.txt")
    prune_copies(remote, "all", [])
    assert remote.list("checkpoints") == ["notes", "step-000002", "step-000004", "step-000006", "step-000007"]
    prune_copies(remote, 2, [])
    assert remote.list("checkpoints") == ["notes", "step-000004", "step-000006", "step-000007"]


def test_copies_are_ordered_by_number(remote: RemoteFolder, tmp_path: Path) -> None:
    copy(remote, local_run(tmp_path, (999_999, 1_000_000)))
    prune_copies(remote, 1, [])
    assert remote.list("checkpoints") == ["step-1000000"]


def test_an_empty_folder_is_filled_from_the_newest_complete_copy(remote: RemoteFolder, tmp_path: Path) -> None:
    copy(remote, local_run(tmp_path / "here", (2, 4)))
    fsspec.filesystem("memory").rm_file("/bucket/runs/r/checkpoints/step-000004/manifest.json")
    asked = asked_in(tmp_path / "there")
    folder, said = folder_of(asked), []
    fetch_run(folder, asked, said.append)
    assert folder.newest_step() == 2 and len(said) == 1 and "fetching step-000002 from memory://" in said[0]
    assert (folder.checkpoints / "step-000002" / "zz.safetensors").read_bytes() == bytes([2]) * 10
    assert folder.read_config().name == "r" and (folder.plans / "001.json").read_text() == "{}"
    fetch_run(folder, asked, said.append)
    assert len(said) == 1, "what is there is not fetched again"


def test_copies_of_another_run_are_refused_and_a_fresh_one_takes_another_name(
    remote: RemoteFolder, tmp_path: Path
) -> None:
    copy(remote, local_run(tmp_path / "here", seed=7))
    asked = asked_in(tmp_path / "there")
    with pytest.raises(UserError, match="another run named 'r'") as caught:
        fetch_run(folder_of(asked), asked, print)
    assert "bucket/runs/r" in caught.value.where and any("seed" in line for line in caught.value.details)
    assert fresh_name(asked, is_taken).name == "r-2" and fresh_name(asked).name == "r"


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", ".."])
def test_names_that_leave_the_folder_are_refused(remote: RemoteFolder, tmp_path: Path, name: str) -> None:
    run = local_run(tmp_path / "here")
    (run.checkpoints / "step-000002" / "manifest.json").write_text(json.dumps({"files": {name: {}}}))
    copy(remote, run)
    asked = asked_in(tmp_path / "there")
    with pytest.raises(UserError, match="cannot be read"):
        fetch_run(folder_of(asked), asked, print)
    assert not folder_of(asked).path.exists()


def test_a_kind_of_store_that_nothing_opens_is_named(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="nosuch"):
        RemoteFolder("nosuch://bucket")
    asked = config(name="r", output__dir=str(tmp_path), checkpoint__copy_to="nosuch://bucket")
    with pytest.raises(UserError, match="cannot be read") as caught:
        fetch_run(folder_of(asked), asked, print)
    assert caught.value.where == "checkpoint.copy_to" and "s3fs" in caught.value.fix
