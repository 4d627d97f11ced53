"""``generate``, ``chat``, ``serve``, ``eval``: options reach the process; what is wrong is said before it starts."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli import process
from manyhands.core.errors import EXIT_USAGE
from manyhands.infer.__main__ import VERBS
from tests.cli.conftest import call


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """(verb, arguments) of the processes that would be started; their functions take these arguments."""
    found: list[tuple[str, dict[str, Any]]] = []

    def run(module: str, arguments: list[str]) -> int:
        verb, request = arguments[0], json.loads(arguments[1])
        inspect.signature(VERBS[verb]).bind(**request)
        found.append((verb, request))
        return 0

    monkeypatch.setattr(process, "run_module", run)
    return found


def test_options_reach_the_process(tmp_path: Path, requests: list[tuple[str, dict[str, Any]]]) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    answers = ("--input", tmp_path / "p.jsonl", "-o", tmp_path / "a.jsonl", "--processes", 3, "--batch-size", 4)
    sampling = ("--temperature", 0.5, "--top-p", 0.9, "--top-k", 5, "--seed", 7, "--stop", "x", "--stop", "y")
    more = ("--tools", tmp_path / "tools.json", "--system", "Be brief.", "--overwrite", "--device-map", "none")
    assert call("generate", tmp_path, *answers, *sampling, *more).exit_code == 0
    _, request = requests.pop()
    settings = {"max_new_tokens": 256, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.0}
    assert request["settings"] == settings | {"seed": 7, "stop": ["x", "y"]}
    placement = {"gpus": None, "processes": 3, "device_map": "none", "batch_size": 4, "engine": "transformers"}
    assert request["placement"] == placement
    assert request["options"] == {"system": "Be brief.", "tools": [{"name": "f"}]} and request["overwrite"]
    rows = tmp_path / "d.jsonl"
    rows.write_text("{}")
    assert call("eval", tmp_path, "--metrics", "loss, rougeL,loss", "--data", rows, "--limit", 5).exit_code == 0
    verb, request = requests.pop()
    assert verb == "evaluate" and request["metrics"] == ["loss", "rougeL"] and request["limit"] == 5
    assert call("eval", tmp_path, "--tasks", "a,b", "--num-fewshot", 2).exit_code == 0
    assert requests.pop()[1]["tasks"] == ["a", "b"]
    assert call("serve", tmp_path, "--port", 18231, "--name", "mine").exit_code == 0
    assert requests.pop()[1]["name"] == "mine"
    assert call("chat", tmp_path, "--temperature", 1).exit_code == 0
    assert call("generate", tmp_path, "--prompt", "-hello").exit_code == 0
    assert requests.pop()[1]["prompt"] == "-hello"


@pytest.mark.parametrize("verb", ["chat", "eval", "serve", "generate"])
def test_a_model_in_place_of_a_run(tmp_path: Path, requests: list[tuple[str, dict[str, Any]]], verb: str) -> None:
    model, adapter, run = (tmp_path / name for name in ("model", "adapter", "run"))
    for folder in (model, adapter, run / "adapter"):
        folder.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for folder, name in (
        (model, "config.json"),
        (adapter, "adapter_config.json"),
        (run, "adapter/adapter_config.json"),
    ):
        (folder / name).write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    more = ("--prompt", "a") if verb == "generate" else ("--port", 18231) if verb == "serve" else ()
    for words, folder, base in (
        (("--model", model), model, None),
        (("--model", run), run, None),
        (("-m", model, "--adapter", adapter), adapter, str(model)),
        (("--adapter", adapter), adapter, None),
        (("--adapter", adapter, "--base", "org/base"), adapter, "org/base"),
        (("--model_name_or_path", "org/base", "--adapter", run), run / "adapter", "org/base"),
    ):
        assert call(verb, *words, *more).exit_code == 0
        assert (requests[-1][1]["folder"], requests[-1][1]["base"]) == (str(folder), base)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "no model was given"),
        (("RUN", "--model", "a/b"), "a run and --model are both given"),
        (("--model", "a/b", "--base", "c/d"), "--base has no effect on --model"),
        (("--model", "a/b", "--base", "c/d", "--adapter", "."), "both name the adapter's base"),
        (("--model", "a/b", "--adapter", "."), "there is no adapter in this folder"),
    ],
)
def test_what_is_no_model_is_refused(arguments: tuple[str, ...], error: str) -> None:
    ended = call("chat", *arguments)
    assert ended.exit_code == EXIT_USAGE and error in ended.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate",), "generate needs --prompt or --input"),
        (("generate", "--prompt", "a", "--input", "p.jsonl"), "--prompt and --input are both given"),
        (("generate", "--input", "p.jsonl"), "--input and --output belong together"),
        (("generate", "--input", "missing.jsonl", "-o", "a"), "there is no such file"),
        (("generate", "--prompt", "a", "--processes", 2), "--processes has an effect with --input only"),
        (("generate", "--prompt", "a", "--overwrite"), "--overwrite has an effect with --input only"),
        (("generate", "--prompt", "a", "--top-k", 5), "no effect on greedy answers"),
        (("generate", "--prompt", "a", "--tools", "missing.json"), "the tools cannot be read"),
        (("chat", "--temperature", -1), "temperature must be 0 or more"),
        (("serve", "--max-new-tokens", 0), "max-new-tokens must be at least 1"),
        (("eval", "--metrics", "bleu"), "there is no metric bleu"),
        (("eval", "--extract", "gsm8k"), "--extract is for exact_match"),
        (("eval", "--tasks", "a", "--data", "d"), "--data has no effect with --tasks"),
        (("eval", "--tasks", "a", "--no-base"), "--no-base has no effect with --tasks"),
        (("eval", "--tasks", "a", "--max-new-tokens", 5), "--max-new-tokens has no effect with --tasks"),
        (("eval", "--limit", 5), "--limit has no effect without answers"),
        (("eval", "--metrics", "loss", "--stop", "x"), "--stop has no effect without answers"),
        (("eval", "--num-fewshot", 2), "are for --tasks"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, requests: list[tuple[str, dict[str, Any]]], arguments: tuple[Any, ...], said: str
) -> None:
    result = call(arguments[0], tmp_path, *arguments[1:])
    assert result.exit_code == EXIT_USAGE and said in result.stderr and not requests
    assert "where: " in result.stderr
