"""``manyhands push``: what would be uploaded is shown, what must not be is refused, and the hub gets just that. The hub
itself is a fake, where huggingface_hub would begin to talk.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.export import push as push_module
from manyhands.export.record import mark_verified, write_record

TOKEN = "hf_" + "a1B2" * 8
FILES = {
    "adapter_config.json": json.dumps({"peft_type": "LORA", "base_model_name_or_path": "someone/base"}),
    "adapter_model.safetensors": "w" * 3000,
    "README.md": "---\nlibrary_name: peft\n---\nsee https://huggingface.co/someone/base and path/to/this/folder\n",
}


class FakeApi:
    """The three calls of HfApi that a push makes. ``private``: of a repository that exists."""

    def __init__(self, private: bool | None = None, failure: Exception | None = None) -> None:
        self.private, self.failure = private, failure
        self.created: list[Any] = []
        self.files: dict[str, bytes] = {}
        self.tokens: list[str] = []

    def connect(self, token: str) -> FakeApi:
        self.tokens.append(token)
        return self

    def repo_info(self, name: str, *, repo_type: str) -> Any:
        if self.private is None:
            raise RepositoryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "http://h")))
        return SimpleNamespace(private=self.private)

    def create_repo(self, name: str, *, private: bool, repo_type: str) -> None:
        self.created.append((name, private, repo_type))

    def create_commit(self, name: str, *, operations: list[Any], commit_message: str, repo_type: str) -> Any:
        if self.failure is not None:
            raise self.failure
        for operation in operations:
            with operation.as_file() as file:
                self.files[operation.path_in_repo] = file.read()
        return SimpleNamespace(commit_url=f"https://hub/{name}/commit/1")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", FILES)


def write_adapter(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    write_record(folder)
    mark_verified(folder, "14 tensors compared in the files")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    api = FakeApi()
    upload = push_module.upload
    monkeypatch.setattr(push_module, "upload", lambda planned, **o: upload(planned, connect=api.connect, **o))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return api


def push(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["push", *(str(argument) for argument in arguments)])


def test_by_default_it_shows_what_it_would_upload_and_sends_nothing(adapter: Path, hub: FakeApi) -> None:
    (adapter / "notes.txt").write_text("mine")
    done = push(adapter, "--to", "me/helper")
    assert done.exit_code == 0, done.output
    for said in (
        "-> me/helper (private): 3 files, 3.1 KiB",
        "adapter_model.safetensors     2.9 KiB",
        "not uploaded, as the export did not write them: notes.txt",
        "an adapter without its base model, which it names: someone/base",
        "nothing was sent; add --yes to upload",
    ):
        assert said in done.stdout, done.stdout
    assert hub.tokens == [] and hub.files == {}


def test_yes_uploads_just_that_to_a_private_repository(adapter: Path, hub: FakeApi) -> None:
    (adapter / "notes.txt").write_text("mine")
    (adapter / "README.md").write_text("my own words")
    done = push(adapter, "--to", "me/helper", "--yes")
    assert done.exit_code == 0, done.output
    assert hub.created == [("me/helper", True, "model")] and hub.tokens == [TOKEN]
    assert hub.files == {name: text.encode() for name, text in (FILES | {"README.md": "my own words"}).items()}
    assert "uploaded: https://hub/me/helper/commit/1" in done.stdout and TOKEN not in done.output


def test_a_public_repository_has_to_be_asked_for(adapter: Path, hub: FakeApi) -> None:
    hub.private = False
    done = push(adapter, "--to", "me/helper", "--yes")
    assert done.exit_code == 2 and "the repository is public" in done.stderr and hub.files == {}
    assert push(adapter, "--to", "me/helper", "--yes", "--public").exit_code == 0
    assert hub.created == [] and set(hub.files) == set(FILES)
    hub.private = True
    assert "was private before, and stays so" in push(adapter, "--to", "me/helper", "--yes", "--public").stdout
    hub.private = None
    assert push(adapter, "--to", "me/new", "--yes", "--public").exit_code == 0
    assert hub.created == [("me/new", False, "model")]


def test_of_a_run_the_adapter_goes_once_it_has_finished(tmp_path: Path, hub: FakeApi) -> None:
    run = tmp_path / "first"
    write_adapter(run / "adapter", FILES)
    write_adapter(run / "merged", {"config.json": "{}", "model.safetensors": "w" * 9000})
    (run / "run.json").write_text("{}")
    for status, code in (({"state": "running"}, 2), ({}, 2), ({"state": "finished"}, 0)):
        (run / "status.json").write_text(json.dumps(status))
        done = push(run, "--to", "me/helper", "--yes")
        assert done.exit_code == code, done.output
        assert code == 0 or ("the run has not finished" in done.stderr and hub.files == {})
    assert set(hub.files) == set(FILES), "not the base's weights, which merged has"
    assert push(run / "merged", "--to", "me/merged", "--yes").exit_code == 0
    assert "model.safetensors" in hub.files


@pytest.mark.parametrize("broken", ["no record", "unverified", "changed", "missing"])
def test_what_was_not_verified_is_refused(adapter: Path, hub: FakeApi, broken: str) -> None:
    expected = "was not verified"
    if broken == "no record":
        (adapter / "manyhands.json").unlink()
    elif broken == "unverified":
        write_record(adapter)
    elif broken == "changed":
        (adapter / "adapter_model.safetensors").write_text("v" * 3000)
        expected = "adapter_model.safetensors is changed"
    else:
        (adapter / "adapter_model.safetensors").unlink()
        expected = "adapter_model.safetensors is missing"
    done = push(adapter, "--to", "me/helper", "--yes")
    assert done.exit_code == 2 and expected in done.stderr and "fix: " in done.stderr
    assert hub.tokens == []


def test_a_folder_of_this_machine_is_no_base_model(tmp_path: Path, hub: FakeApi) -> None:
    private = json.dumps({"base_model_name_or_path": "/data/secret/base", "r": 8})
    card = FILES["README.md"] + 'from_pretrained("path/to/base")'
    folder = write_adapter(tmp_path / "adapter", FILES | {"adapter_config.json": private, "README.md": card})
    done = push(folder, "--to", "me/helper", "--yes")
    assert done.exit_code == 2 and "base_model_name_or_path" in done.stderr and "--base OWNER/NAME" in done.stderr
    assert push(folder, "--to", "me/helper", "--yes", "--base", "someone/base").exit_code == 0
    assert json.loads(hub.files["adapter_config.json"]) == {"base_model_name_or_path": "someone/base", "r": 8}
    sent = ModelCard(hub.files["README.md"].decode())
    assert (sent.data.base_model, sent.data.to_dict()["base_model_relation"]) == ("someone/base", "adapter")
    assert 'from_pretrained("someone/base")' in sent.text
    assert (folder / "adapter_config.json").read_text() == private, "the folder here stays as it is"
    assert (folder / "README.md").read_text() == card
    (folder / "README.md").write_text("my own words")
    assert push(folder, "--to", "me/helper", "--yes", "--base", "someone/base").exit_code == 0
    assert hub.files["README.md"] == b"my own words"


@pytest.mark.parametrize("text", ["trained on /home/ann/rows/a.jsonl", f"use {TOKEN}", "see ~/models/base"])
def test_paths_of_this_machine_and_tokens_stay_here(adapter: Path, hub: FakeApi, text: str) -> None:
    (adapter / "README.md").write_text(text)
    done = push(adapter, "--to", "me/helper", "--yes")
    assert done.exit_code == 2 and "README.md: " in done.stderr and TOKEN not in done.output
    assert hub.tokens == []


@pytest.mark.parametrize("name", ["README.md", "adapter_config.json", "manyhands.json"])
def test_a_link_is_not_followed(adapter: Path, tmp_path: Path, hub: FakeApi, name: str) -> None:
    elsewhere = tmp_path / "id_rsa"
    elsewhere.write_text((adapter / name).read_text() if (adapter / name).exists() else "notes")
    (adapter / name).unlink(missing_ok=True)
    (adapter / name).symlink_to(elsewhere)
    done = push(adapter, "--to", "me/helper", "--yes")
    assert done.exit_code == 2 and f"{name} is a link" in done.stderr and hub.files == {}


def test_a_token_in_any_text_stays_here(tmp_path: Path, hub: FakeApi) -> None:
    secret = "glpat-aB3dE5gH7jK9mN1pQ2rS"
    for name in ("chat_template.jinja", "modeling_own.py", "special_tokens_map.json"):
        folder = write_adapter(tmp_path / name, FILES | {name: f"x = '{secret}'"})
        done = push(folder, "--to", "me/helper", "--yes")
        assert done.exit_code == 2 and f"{name}: a GitLab token" in done.stderr and secret not in done.output
    assert hub.files == {}


@pytest.mark.parametrize("name", ["helper", "me/", "me/a/b", "me/he lper", "../x", "me/x.."])
def test_names_that_the_hub_has_not(adapter: Path, hub: FakeApi, name: str) -> None:
    done = push(adapter, "--to", name)
    assert done.exit_code == 2 and "is not a valid repository name" in done.stderr


def test_without_a_token_or_a_hub_it_says_what_to_do(
    adapter: Path, hub: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = httpx.Request("POST", "https://hub")
    for failure in (
        HfHubHTTPError(f"403 Forbidden for {TOKEN}", response=httpx.Response(403, request=request)),
        httpx.ConnectError("no route to host"),
    ):
        hub.failure = failure
        done = push(adapter, "--to", "me/helper", "--yes")
        assert done.exit_code == 1 and "the hub did not take the upload" in done.stderr, done.output
        assert TOKEN not in done.output and "Traceback" not in done.output
    monkeypatch.delenv("HF_TOKEN")
    done = push(adapter, "--to", "me/helper", "--yes")
    assert done.exit_code == 2 and "where: HF_TOKEN" in done.stderr


def test_other_bad_input(tmp_path: Path, hub: FakeApi) -> None:
    done = push(tmp_path / "nowhere", "--to", "me/helper")
    assert done.exit_code == 2 and "there is no such file or folder" in done.stderr
    model = write_adapter(tmp_path / "model", {"config.json": "{}"})
    done = push(model, "--to", "me/helper", "--base", "someone/base")
    assert done.exit_code == 2 and "--base is for an adapter" in done.stderr
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "status.json").write_text('{"state": "finished"}')
    done = push(tmp_path / "run", "--to", "me/helper")
    assert done.exit_code == 2 and "neither an adapter nor a model" in done.stderr
