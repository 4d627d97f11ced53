"""What a base model holds, by content: in the hub's cache by name, elsewhere hashed once; another weight is another
model.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file, save_file

from manyhands.core.errors import UserError
from manyhands.facts import identity
from manyhands.facts.identity import check_files, differing_files, identify_files
from manyhands.importers.load import config_from_mapping
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.prepare import prepare_run
from tests.support.tiny import write_tiny_model


def make_config(folder: Path, **keys: dict[str, object]):
    sections = {
        "name": "r",
        "model": {"name": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl"), "cache": str(folder / "cache"), "max_length": 64},
        "parallel": {"gpus": 1, "device": "cpu"},
        "output": {"dir": str(folder / "runs")},
    }
    for name, section in keys.items():
        sections[name] |= section
    return config_from_mapping(sections, where="test")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model", "llama")
    return tmp_path / "model"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def change_a_weight(model: Path) -> None:
    """The same names, shapes, dtypes and headers; one value differs. The file's time stays."""
    path = model / "model.safetensors"
    status, raw = path.stat(), bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_every_file_that_decides_what_the_model_computes_is_named(model: Path) -> None:
    config = make_config(model.parent)
    files = identify_files(model, config)
    assert files == {name: sha256(model / name) for name in ("config.json", "model.safetensors")}
    (model / "modeling.py").write_text("x = 1")
    assert identify_files(model, config) == files
    assert identify_files(model, make_config(model.parent, model={"trust_remote_code": True})).keys() - files == {
        "modeling.py"
    }
    assert identify_files(model, make_config(model.parent, model={"init": "random"})).keys() == {"config.json"}
    change_a_weight(model)
    assert [line.split(":")[0] for line in differing_files(files, identify_files(model, config))] == [
        "model.safetensors"
    ]
    assert differing_files(files, identify_files(model, config), weights=False) == []


def test_a_blob_of_the_hubs_cache_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is its SHA-256; this one lies, which only reading it would show, as is done in any other folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (snapshot / "config.json").write_text("{}")
    (blobs / ("e" * 64)).write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / ("e" * 64))
    files = identify_files(snapshot, make_config(tmp_path))
    assert files == {"config.json": sha256(snapshot / "config.json"), "model.safetensors": "e" * 64}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        found = identify_files(snapshot, make_config(tmp_path))
        assert found["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    (snapshot / "model.safetensors").unlink()
    (tmp_path / ("e" * 64)).write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(tmp_path / ("e" * 64))  # no blob of the cache: its name says nothing
    assert (
        identify_files(snapshot, make_config(tmp_path))["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    )


def test_a_file_is_hashed_once_and_again_when_it_changes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def count(paths, progress):
        hashed.extend(path.name for path in paths)
        return hash_files(paths, progress)

    hash_files = identity.hash_files
    monkeypatch.setattr(identity, "hash_files", count)
    monkeypatch.setattr(identity, "SETTLED_S", -60.0)
    config = make_config(model.parent)
    first = identify_files(model, config)
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    assert identify_files(model, config) == first and len(hashed) == 2
    time.sleep(0.1)  # some file systems count time in ticks of 10 ms
    change_a_weight(model)
    assert identify_files(model, config) != first and hashed[2:] == ["model.safetensors"]


def test_a_file_that_has_just_changed_is_not_remembered(model: Path) -> None:
    identify_files(model, make_config(model.parent))
    assert not (model.parent / "cache" / "weights").exists()


def test_a_lora_run_does_not_go_on_on_other_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "the cat", "completion": " ".join(["sat"] * (1 + i % 9))} for i in range(50)]
    (model.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(model.parent)

    def start() -> RunFolder:
        prepared = prepare_run(config, report=lambda line: None)
        prepared.release()
        return prepared.folder

    folder = start()
    (folder.checkpoints / "step-000001").mkdir(parents=True)
    (folder.checkpoints / "step-000001" / "manifest.json").write_text("{}")
    folder.write_status("running")
    assert start().read_plan().cause == "resume"
    whole = (model / "model.safetensors").read_bytes()
    change_a_weight(model)
    with pytest.raises(UserError, match="would not continue the run as it was") as refused:
        start()
    assert [line.split(":")[0] for line in refused.value.details] == ["model.safetensors"]
    (model / "model.safetensors").write_bytes(whole)
    save_file(load_file(model / "model.safetensors"), model / "model.safetensors", metadata={"format": "pt"})
    assert start().read_plan().cause == "resume", "the same bytes, written anew"


def test_a_machine_with_other_weights_is_refused(model: Path) -> None:
    """Its first rank compares what lies there with the plan, which rank 0 of the run has made elsewhere."""
    from manyhands.worker.stages import check_base

    config = make_config(model.parent)
    plan = SimpleNamespace(model_folder=str(model), model_files=identify_files(model, config))
    process = SimpleNamespace(beat=lambda: None)
    rank = SimpleNamespace(world=SimpleNamespace(local_rank=0), plan=plan, config=config, process=process)
    check_base(rank)
    change_a_weight(model)
    with pytest.raises(UserError, match="base model is not the one") as refused:
        check_base(rank)
    assert "model.safetensors" in refused.value.details[0]
    rank.world.local_rank = 1  # the first one of the machine does it
    check_base(rank)
    with pytest.raises(UserError, match="base model is not the one"):
        check_files(model, config, plan.model_files)
