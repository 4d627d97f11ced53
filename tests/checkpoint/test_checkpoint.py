"""One process without a process group: saving, finding, retention, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from manyhands.checkpoint import (
    clean_leftovers,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune,
    read_manifest,
    save_checkpoint,
    shard_writer,
)
from manyhands.checkpoint import load as load_module
from manyhands.checkpoint import save as save_module
from manyhands.checkpoint.load import check_files, find_sound
from manyhands.checkpoint.manifest import TRAIN_STATE, FileEntry, Manifest, checkpoint_folder, hash_file, set_aside
from manyhands.core import files as core_files
from manyhands.core.errors import UserError

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def build(width: int = 4, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder: Path, step: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(seed=seed)
    train(model, optimizer)
    state = {"step": step, "best_loss": None}
    save_checkpoint(
        folder / f"step-{step:06d}", model, optimizer, state, rank=0, world_size=1, manifest_extra={"plan": "abc"}
    )
    return model, optimizer


def test_a_round_trip_gives_the_same_next_step(tmp_path: Path) -> None:
    model, optimizer = save(tmp_path, 1)
    other, fresh = build(seed=1)
    state = load_checkpoint(tmp_path / "step-000001", other, fresh)
    assert state == {"step": 1, "best_loss": None}
    for net, opt in ((model, optimizer), (other, fresh)):
        train(net, opt)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert read_manifest(tmp_path / "step-000001").extra == {"plan": "abc"}


def test_files_are_safetensors_and_json_only(tmp_path: Path) -> None:
    save(tmp_path, 1)
    names = sorted(p.name for p in (tmp_path / "step-000001").iterdir())
    assert names == ["manifest.json", "shard-00001-model-00001-of-00001.safetensors", "train_state.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_without_an_optimizer_only_parameters_are_loaded_in_the_models_dtype(tmp_path: Path) -> None:
    model, _ = save(tmp_path, 1)
    other = build(seed=1)[0].to(torch.float64)
    load_checkpoint(tmp_path / "step-000001", other, None)
    assert all(torch.equal(a.double(), b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_optimizer_before_its_first_step_stays_empty(tmp_path: Path) -> None:
    model, optimizer = build()
    save_checkpoint(tmp_path / "step-000000", model, optimizer, {}, rank=0, world_size=1)
    other, fresh = build(seed=1)
    train(other, fresh)
    load_checkpoint(tmp_path / "step-000000", other, fresh)
    assert not fresh.state


@pytest.mark.parametrize("change", ["shape", "frozen", "dtype"])
def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path, change: str) -> None:
    save(tmp_path, 1)
    model, optimizer = build(width=5 if change == "shape" else 4)
    if change == "frozen":
        model[1].requires_grad_(False)
    if change == "dtype":
        model.double()
    with pytest.raises(UserError) as caught:
        load_checkpoint(tmp_path / "step-000001", model, optimizer)
    text = {
        "shape": "0.weight: shape [5, 3] here, [4, 3]",
        "frozen": "not trained in this run: 1.weight",
        "dtype": "float64 here, float32",
    }
    assert text[change] in str(caught.value)


def test_optimizer_states_of_another_layout_are_refused_by_name(tmp_path: Path) -> None:
    """A manifest in which a state has another shape than this layout gives it, as blocks over the shards of other ranks
    have.
    """
    save(tmp_path, 1)
    file = tmp_path / "step-000001" / "manifest.json"
    manifest = json.loads(file.read_text())
    name = next(name for name in manifest["tensors"] if "exp_avg" in name)
    manifest["tensors"][name]["shape"] = [99]
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="cannot be loaded in this layout") as caught:
        load_checkpoint(tmp_path / "step-000001", *build(seed=1))
    assert list(caught.value.details) == [name.removeprefix("optim.")] and caught.value.why.startswith("1 of them")


def test_a_save_without_manifest_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-000002" / "manifest.json").unlink()
    (tmp_path / "step-000003.tmp").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000001"
    said: list[str] = []
    assert clean_leftovers(tmp_path, said.append) == ["step-000003.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002.damaged"]
    assert (tmp_path / "step-000002.damaged" / SHARD).is_file(), "it may be all that is left, or being copied back"
    assert len(said) == 1 and "step-000002 has no manifest.json" in said[0] and "step-000002.damaged" in said[0]
    assert clean_leftovers(tmp_path, said.append) == [] and len(said) == 1, "said once"
    assert newest_checkpoint(tmp_path / "nothing") is None


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_taken_for_an_incomplete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    before = load_module.list_checkpoints(tmp_path)
    save(tmp_path, 2)
    prune(tmp_path, keep_last=1)
    seen = iter([before, load_module.list_checkpoints(tmp_path)])
    monkeypatch.setattr(load_module, "list_checkpoints", lambda folder: next(seen))
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000002"


@pytest.mark.parametrize(("late", "num_ranks"), [(True, 2), (False, 2), (False, 1)])
def test_shards_that_a_network_disk_shows_late_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, num_ranks: int
) -> None:
    partial, now = tmp_path / "step-000001.tmp", [0.0]
    partial.mkdir()
    (partial / "a").write_bytes(b"12")

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if late and now[0] > 60:
            (partial / "a").write_bytes(b"1234")

    monkeypatch.setattr(save_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    manifest = Manifest(world_size=num_ranks, files={"a": FileEntry(bytes=4, sha256="")}, tensors={})
    if late:
        save_module.commit(partial, tmp_path / "step-000001", manifest)
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
        return
    with pytest.raises(UserError, match="do not see the same checkpoint folder"):
        save_module.commit(partial, tmp_path / "step-000001", manifest)
    assert now[0] >= 120 if num_ranks > 1 else now[0] == 0, "one rank alone has nobody to wait for"


def test_a_replaced_checkpoint_survives_a_kill_between_the_renames(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1, seed=3)  # the same step again replaces it
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.old")
    clean_leftovers(tmp_path)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000001"


def test_a_cut_file_is_named_with_the_checkpoint_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    shard = next((tmp_path / "step-000002").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(UserError) as caught:
        newest_checkpoint(tmp_path)
    assert shard.name in str(caught.value)
    assert "step-000001" in caught.value.fix


def test_what_is_set_aside_is_no_checkpoint_before(tmp_path: Path) -> None:
    """Nor is one of a later step whose name has more digits."""
    for step in (2, 4, 999998, 999999, 1000000):
        save(tmp_path, step)
    set_aside(checkpoint_folder(tmp_path, 2))
    set_aside(checkpoint_folder(tmp_path, 999998))
    for step, said in ((4, "there is no earlier checkpoint"), (999999, "step-000004"), (1000000, "step-999999")):
        (checkpoint_folder(tmp_path, step) / TRAIN_STATE).unlink()
        with pytest.raises(UserError) as caught:
            check_files(checkpoint_folder(tmp_path, step))
        assert caught.value.fix.endswith(said)


def test_a_changed_train_state_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000001" / "train_state.json").write_text(json.dumps({"step": 9, "best_loss": None}, indent=1))
    with pytest.raises(UserError, match=r"train_state\.json is damaged"):
        load_checkpoint(tmp_path / "step-000001", *build())


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    assert prune(tmp_path, keep_last=2, keep={2}) == [1, 3]
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]


def test_an_unwritable_place_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file cannot be read or written"):
        save_checkpoint(tmp_path / "file" / "step-000001", *build(), {}, rank=0, world_size=1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "flipped": lambda folder: flip(folder / SHARD),
    "cut": lambda folder: os.truncate(folder / SHARD, 100),
    "missing": lambda folder: (folder / SHARD).unlink(),
    "state": lambda folder: flip(folder / "train_state.json"),
    "manifest": lambda folder: os.truncate(folder / "manifest.json", 100),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_kept(tmp_path: Path, damage: str) -> None:
    for step in (2, 4, 7):
        save(tmp_path, step)
    DAMAGES[damage](tmp_path / "step-000007")
    said: list[str] = []
    assert find_sound(tmp_path, said.append) == tmp_path / "step-000004"
    (line,) = said
    assert "in step-000007: " in line or "manifest cannot be read in step-000007" in line
    assert line.endswith("kept as step-000007.damaged. The run resumes from step-000004: 3 steps are trained again")
    assert find_sound(tmp_path, said.append) == tmp_path / "step-000004" and len(said) == 1, "said once"
    assert clean_leftovers(tmp_path) == [] and len(list((tmp_path / "step-000007.damaged").iterdir())) >= 2
    save(tmp_path, 7)
    DAMAGES[damage](tmp_path / "step-000007")
    find_sound(tmp_path, said.append)
    assert (tmp_path / "step-000007.damaged-2").is_dir(), "the first one is kept too"


def test_where_no_checkpoint_is_sound_nothing_is_touched(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path, step)
        flip(tmp_path / f"step-{step:06d}" / SHARD)
    with pytest.raises(UserError, match="all 2 checkpoints are damaged") as caught:
        find_sound(tmp_path, print)
    assert len(caught.value.details) == 2 and [step for step, _ in list_checkpoints(tmp_path)] == [2, 4]
    shutil.rmtree(tmp_path / "step-000002")
    with pytest.raises(UserError, match="is damaged") as caught:
        find_sound(tmp_path, print)
    assert "to start over: there is no earlier checkpoint" in caught.value.fix


@pytest.mark.parametrize("sizes", [(), (1,), (31,), (32,), (33,), (5, 27), (20, 50, 26), (96, 1)])
def test_a_written_file_has_the_digest_that_its_check_computes(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shard_writer.PIECE_BYTES == core_files.PIECE_BYTES
    monkeypatch.setattr(shard_writer, "PIECE_BYTES", 32)
    monkeypatch.setattr(shard_writer, "CHUNK_BYTES", 12)
    monkeypatch.setattr(core_files, "PIECE_BYTES", 32)
    path = tmp_path / "shard"
    parts = [os.urandom(size) for size in sizes]
    pieces = [b"".join(parts)[start : start + 32] for start in range(0, max(1, sum(sizes)), 32)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    assert shard_writer.write_file(str(path), parts) == hash_file(path).model_dump()
    assert hash_file(path).sha256 == expected and path.read_bytes() == b"".join(parts)


def test_a_checkpoint_of_another_version_is_not_taken_for_damaged(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    file = tmp_path / "step-000004" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 1}))
    with pytest.raises(UserError, match="manifest cannot be read"):
        find_sound(tmp_path, print)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 4]


def test_a_damaged_checkpoint_is_passed_over_where_its_folder_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on overlayfs, for a folder that came with the image."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    shard = tmp_path / "step-000002" / SHARD
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.is_dir():
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    said: list[str] = []
    assert find_sound(tmp_path, said.append) == tmp_path / "step-000001" and len(said) == 1
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000001" and shard.is_file()
    assert clean_leftovers(tmp_path, said.append) == [] and len(said) == 1
