"""What is written survives a cut of power, has the mode of any new file, and leaves nothing half-written; links are not
followed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyhands.checkpoint import save_checkpoint
from manyhands.core.errors import UserError
from manyhands.core.files import is_disk_full, make_folder, refuse_outside_links, remove_temporaries, write_json
from manyhands.export.adapter import export_adapter
from manyhands.export.model import export_model
from manyhands.facts.adapter import locate_adapter
from manyhands.facts.hub import locate_model
from manyhands.infer.load import find_parts
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.lock import FolderLock
from tests.export.tiny import METHOD, adapt, make_model, save_source


class Disk:
    """What would be left after a cut of power: sizes of synced files, folders whose names are synced, renames that came
    too early.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.folders: set[str] = set()
        self.early: list[str] = []

    def sync(self, path: str) -> None:
        if os.path.isdir(path):
            self.folders.add(path)
        else:
            self.sizes[path] = os.path.getsize(path)

    def rename(self, source: str, target: str) -> None:
        for folder, _, names in os.walk(source):
            self.early += [name for name in names if self.sizes.get(os.path.join(folder, name)) is None]
        if source not in self.sizes and not os.path.isdir(source):
            self.early.append(source)
        moved = {
            path: path.replace(source, target, 1)
            for path in [*self.sizes, *self.folders]
            if f"{path}/".startswith(f"{source}/")
        }
        self.sizes |= {new: self.sizes[old] for old, new in moved.items() if old in self.sizes}
        self.folders |= {new for old, new in moved.items() if old in self.folders}
        self.folders.discard(os.path.dirname(target))  # its list of names has changed

    def missing(self, written: Path) -> list[str]:
        files = [path for path in [written, *written.rglob("*")] if path.is_file()]
        lost = [path.name for path in files if self.sizes.get(str(path)) != path.stat().st_size]
        folders = {str(path.parent) for path in [written, *files]}
        return self.early + lost + sorted(folders - self.folders)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk, fsync, rename, replace = Disk(), os.fsync, os.rename, os.replace

    def watched_sync(descriptor: int) -> None:
        fsync(descriptor)
        disk.sync(os.readlink(f"/proc/self/fd/{descriptor}"))

    def watched(original: Callable[..., None]) -> Callable[..., None]:
        def call(source: os.PathLike[str], target: os.PathLike[str]) -> None:
            disk.rename(str(source), str(target))
            original(source, target)

        return call

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "rename", watched(rename))
    monkeypatch.setattr(os, "replace", watched(replace))
    return disk


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source") / "base", make_model())


@pytest.fixture(params=["model", "adapter", "checkpoint", "json"])
def write(request: pytest.FixtureRequest, source: Path) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        match request.param:
            case "model":
                export_model(path, make_model(), source, "float32", rank=0, shard_bytes=100_000)
            case "adapter":
                export_adapter(path, adapt(make_model()), METHOD, str(source), rank=0)
            case "checkpoint":
                save_checkpoint(path, make_model(), None, {"step": 1}, rank=0, world_size=1)
            case "json":
                write_json(path, {"step": 1})

    return write


def test_what_is_written_is_on_the_disk_before_it_has_its_name(
    write: Callable[[Path], None], disk: Disk, tmp_path: Path
) -> None:
    write(tmp_path / "written")
    assert disk.missing(tmp_path / "written") == []


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_files_have_the_mode_that_new_files_get(write: Callable[[Path], None], umask: int, tmp_path: Path) -> None:
    write(tmp_path / "written")
    files = [path for path in [tmp_path / "written", *(tmp_path / "written").rglob("*")] if path.is_file()]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: oct(0o640) for path in files}


def test_folders_and_the_runs_own_files_have_it_too(umask: int, tmp_path: Path) -> None:
    folders = {make_folder(tmp_path, "unfinished-") for _ in range(3)}
    assert len(folders) == 3 and {folder.stat().st_mode & 0o777 for folder in folders} == {0o750}
    os.umask(0o002)  # for a group: whoever is in it may go on with the run
    FolderLock(RunFolder(tmp_path)).release()
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o664


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".status.json.4711.tmp", "notes.tmp", ".hidden", "run.json"):
        (tmp_path / name).write_text("half")
    (tmp_path / ".folder.tmp").mkdir()
    remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".folder.tmp", ".hidden", "notes.tmp", "run.json"]


@pytest.mark.parametrize(
    "name",
    ["preprocessor_config.json", "generation_config.json", "tokenizer.json", "additional_chat_templates/a.jinja"],
)
def test_a_link_out_of_the_models_folder_is_refused_wherever_it_is_opened(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"token": "hunter2"}')
    folder = save_source(tmp_path / "base", make_model())
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(UserError, match="is a link that leaves the model's folder"):
        export_model(tmp_path / "model", make_model(), folder, "float32", rank=0)
    assert not any(
        "hunter2" in path.read_text(errors="replace") for path in tmp_path.glob("model*/*") if path.is_file()
    )
    for opened in (lambda: locate_model(str(folder), None, True), lambda: find_parts(folder)):
        with pytest.raises(UserError, match="is a link that leaves the model's folder") as caught:
            opened()
        assert caught.value.where == str(folder / name) and str(secret) in caught.value.why


def test_an_adapters_links_are_refused_too(source: Path, tmp_path: Path) -> None:
    export_adapter(tmp_path / "adapter", adapt(make_model()), METHOD, str(source), rank=0)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to("../elsewhere.safetensors")
    for opened in (locate_adapter, find_parts):
        with pytest.raises(UserError, match="is a link that leaves the model's folder"):
            opened(tmp_path / "adapter")


def test_a_hub_cache_of_links_into_its_own_blobs_is_exported_and_others_blobs_are_not(
    source: Path, tmp_path: Path
) -> None:
    repository, other = tmp_path / "hub" / "models--someone--tiny", tmp_path / "hub" / "models--someone--else"
    snapshot = repository / "snapshots" / "0123abcd"
    for folder in (repository / "blobs", other / "blobs", snapshot):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        (repository / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)  # the folder itself may be named by a link
    for folder in (snapshot, tmp_path / "link"):
        assert locate_model(str(folder), None, True) == snapshot
        export_model(tmp_path / f"model-{folder.name}", make_model(), folder, "float32", rank=0)
    assert not any(path.is_symlink() for path in (tmp_path / "model-link").iterdir())
    (other / "blobs" / "0").write_text("{}")
    (snapshot / "preprocessor_config.json").symlink_to("../../../models--someone--else/blobs/0")
    with pytest.raises(UserError, match=r"preprocessor_config\.json is a link"):
        refuse_outside_links(snapshot)


def test_links_within_the_folder_and_circles_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "processor_config.json").symlink_to("config.json")
    (tmp_path / "notes").symlink_to("/etc/hostname")  # nothing that is read
    refuse_outside_links(tmp_path)
    (tmp_path / "circle.json").symlink_to("circle.json")
    refuse_outside_links(tmp_path)  # nothing can be read through it


def test_blobs_on_another_disk_belong_to_the_cache_of_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    snapshot = tmp_path / "models--o--n" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "1234").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refuse_outside_links(snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="is a link that leaves the model's folder"):
        refuse_outside_links(snapshot)


def test_a_folder_that_only_looks_like_a_cache_allows_no_other_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "c0ffee"
    for folder in (snapshot, tmp_path / "blobs"):
        folder.mkdir(parents=True)
    (tmp_path / "blobs" / "1234").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    with pytest.raises(UserError, match="is a link that leaves the model's folder"):
        refuse_outside_links(snapshot)


@pytest.mark.parametrize("place", ["additional_chat_templates", "additional_chat_templates/within"])
def test_folders_of_templates_are_no_way_out(tmp_path: Path, place: str) -> None:
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "id_rsa").write_text("key")
    (tmp_path / "model" / place).parent.mkdir(parents=True)
    (tmp_path / "model" / place).symlink_to(tmp_path / "home")
    with pytest.raises(UserError, match="is a link that leaves the model's folder"):
        refuse_outside_links(tmp_path / "model")


def test_shared_memory_that_is_full_is_no_full_disk() -> None:
    assert is_disk_full(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/run/x"))
    assert not is_disk_full(RuntimeError("unable to write /dev/shm/nccl-1: No space left on device (28)"))
