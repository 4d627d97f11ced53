"""``manyhands eval --tasks``: lm-eval's figures beside our own, where the library is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.infer.compare import compare
from manyhands.infer.harness import describe, run_tasks
from manyhands.infer.load import open_answerer
from manyhands.infer.settings import GenerationSettings
from tests.support.tiny import write_tiny_model

QUESTIONS = ("alpha?", "beta, and what follows?", "gamma delta", "epsilon")
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: 10, do_sample: false}}
filter_list: [{{name: stripped, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.infer.harness.find_spec", lambda name: None)
    with pytest.raises(UserError, match="lm-eval is not installed") as refused:
        run_tasks(tmp_path, ["gsm8k"])
    assert refused.value.fix == "pip install lm-eval"


def test_figures_are_lines_with_their_errors() -> None:
    results = {"results": {"a": {"alias": "a", "exact_match,strict": 0.25, "exact_match_stderr,strict": 0.1}}}
    assert describe(results).split() == ["a", "exact_match,strict", "0.2500", "±", "0.1000"]


@pytest.mark.slow
def test_exact_match_is_lm_evals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    base = write_tiny_model(tmp_path / "base", "llama")
    own = [open_answerer(base).answer([{"role": "user", "content": q}], 10) for q in QUESTIONS]
    answers = [own[0], own[1] + "x", "no", own[3]]
    file = tmp_path / "rows.jsonl"
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, answers, strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(TASK.format(name="own", file=file))
    options = {"include_path": str(tmp_path / "tasks"), "apply_chat_template": True}
    theirs = run_tasks(base, ["own"], batch_size=2, **options)
    ours = compare(
        base, data=str(file), metrics=["exact_match"], settings=GenerationSettings(max_new_tokens=10)
    ).columns["measured"]
    assert theirs["results"]["own"]["exact_match,stripped"] == ours["exact_match"] == 0.5
    with pytest.raises(UserError, match="lm-eval knows no task nonsense"):
        run_tasks(base, ["nonsense"], **options)
