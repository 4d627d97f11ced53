"""``data.train`` and ``data.validation`` as lists: errors by place, paths, overrides, explanations, contradictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.cli.config import config as show_key
from manyhands.config.checks import check
from manyhands.config.keys import explain, json_schema
from manyhands.config.schema import RunConfig, Source
from manyhands.core.errors import UserError
from manyhands.importers.load import load_config
from tests.config.builders import config

LIST = """model: {name: org/model}
data:
  train:
    - a.jsonl
    - path: b.csv
      weight: 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        load_config(path, overrides)
    return str(raised.value)


def test_a_list_of_paths_and_sources_and_its_dump(tmp_path: Path) -> None:
    found = load_config(write(tmp_path, LIST))
    assert found.data.train == ("a.jsonl", Source(path="b.csv", weight=2))
    assert RunConfig.model_validate_json(found.model_dump_json()) == found
    assert load_config(write(tmp_path, found.model_dump_json())).digest == found.digest  # JSON is YAML


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("{path: b, wieght: 2}", "line 4: unknown key `data.train[0].wieght`: did you mean `data.train[0].weight`?"),
        (
            "{path: b, weight: 0}",
            "line 4: `data.train[0].weight`: got 0, allowed: a number > 0. Passes over the source",
        ),
        ("{path: b, max_samples: true}", "line 4: `data.train[0].max_samples`: got true, allowed: an integer >= 1"),
        ("{path: b, format: xml}", "`data.train[0].format`: got xml, allowed: `auto`, `messages`"),
        ("{path: b, fields: [x]}", "`data.train[0].fields`: got"),
        ("{path: b, fields: {prompt: 3}}", "`data.train[0].fields`: got"),
        ("{path: b, 7: 2}", "unknown key `data.train[0].7`; a source has path, name"),
        ("{weight: 2}", "line 4: `data.train[0].path` is missing. A .jsonl"),
        ("{path: true}", "`data.train[0].path`: got true"),
        ("3", "line 4: `data.train[0]`: got 3, allowed: a path, or a source with path"),
        ("''", "`data.train[0]`: got"),
        ("[a]", "`data.train[0]`: got"),
    ],
)
def test_an_error_in_a_source_names_its_place(tmp_path: Path, item: str, said: str) -> None:
    text = refusal(write(tmp_path, f"model: {{name: m}}\ndata:\n  train:\n    - {item}\n    - c.jsonl\n"))
    assert said in text and "has an error" in text


def test_a_list_must_hold_something_and_a_source_must_be_in_a_list(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, "model: {name: m}\ndata: {train: [], validation: {path: x}}\n"))
    assert "`data.train` is an empty list" in text and "validation: [{path: ...}]" in text
    assert "`data.train`: got 3, allowed: text or a list" in refusal(
        write(tmp_path, "model: {name: m}\ndata: {train: 3}\n")
    )


def test_paths_of_every_form_are_taken_from_the_run_files_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    (folder / "sets").mkdir(parents=True)
    for name in ("a.jsonl", "b.csv", "sets/v.jsonl"):
        (folder / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    path = write(
        folder, LIST + "    - hub:o/set\n    - elsewhere.jsonl\n  validation: [{path: sets}]\nmethod: {adapter: sets}\n"
    )
    found = load_config(Path("runs/run.yaml"))
    assert found.data.train[0] == str(folder / "a.jsonl") and found.data.train[1].path == str(folder / "b.csv")
    assert found.data.train[2:] == ("hub:o/set", "elsewhere.jsonl")
    assert found.data.validation[0].path == found.method.adapter == str(folder / "sets")
    assert load_config(path, ["data.train=[a.jsonl]"]).data.train == (str(folder / "a.jsonl"),)


def test_overrides_of_lists_sources_and_mappings(tmp_path: Path) -> None:
    path = write(tmp_path, LIST)
    assert load_config(path, ["data.train=2024"]).data.train == "2024"
    assert load_config(path, ["data.train=[x.jsonl, {path: y.jsonl, weight: 0.5}]"]).data.train[1].weight == 0.5
    changed = load_config(path, ["data.train[0].weight=3", "data.train[1].weight=0.5", "data.fields.prompt=frage"]).data
    assert [source.weight for source in changed.train] == [3, 0.5] and changed.fields == {"prompt": "frage"}
    single = load_config(path, ["data.train=one.jsonl", "data.train[0].max_samples=5"]).data.train
    assert single == (Source(path="one.jsonl", max_samples=5),)
    assert load_config(path, ["data.chat_template_kwargs.enable_thinking=false"]).data.chat_template_kwargs == {
        "enable_thinking": False
    }
    text = refusal(
        path, "data.train[2].weight=2", "data.train[0].wait=2", "data.fields.prompt=3", "data.max_samples.x=1"
    )
    assert "command line: `data.train[2].weight`: `data.train` has no source 2 (the first is 0)" in text
    assert "command line: unknown key `data.train[0].wait`" in text
    assert "`data.fields`: got" in text and "unknown key `data.max_samples.x`" in text


def test_roles_of_a_source_are_those_of_templates_and_of_rows_that_name_roles(tmp_path: Path) -> None:
    text = "model: {name: m}\ndata:\n  train: [{path: a.jsonl, format: FORMAT, roles: {visitor: ROLE}}]\n"
    found = load_config(write(tmp_path, text.replace("FORMAT", "messages").replace("ROLE", "user"))).data.train
    assert found[0].roles == {"visitor": "user"}
    assert "`user`, `assistant`" in refusal(write(tmp_path, text.replace("FORMAT", "messages")))
    no_roles = refusal(write(tmp_path, text.replace("FORMAT", "alpaca").replace("ROLE", "user")))
    assert "`data.train[0].roles` has no effect with `data.train[0].format: alpaca`" in no_roles


@pytest.mark.parametrize(("value", "held"), [("0.1", 0.1), ("3", 3), ("0.0", 0.0), ("0", 0), ("1", 1)])
def test_a_whole_number_is_held_out_as_that_many_samples(tmp_path: Path, value: str, held: float) -> None:
    found = load_config(write(tmp_path, LIST), [f"data.validation_fraction={value}"]).data.validation_fraction
    assert (found, found >= 1) == (held, held >= 1)
    for wrong in ("1.0", "1.5", "-1"):
        text = refusal(write(tmp_path, LIST), f"data.validation_fraction={wrong}")
        assert "a number >= 0 and < 1 or an integer >= 1" in text


def test_sources_are_explained() -> None:
    text = explain("data.train")
    assert "a path" in text and "weight: Passes over the source per epoch" in text and "subset: hub:" in text
    assert "a number > 0" in explain("data.train[1].weight")
    assert "default: train" in explain("data.validation.split")
    with pytest.raises(UserError):
        show_key("data.train[1].nothing")


def test_the_json_schema_knows_sources() -> None:
    schema = json_schema()
    assert {"$ref": "#/$defs/Source"} in schema["$defs"]["DataSection"]["properties"]["train"]["anyOf"][1]["items"][
        "anyOf"
    ]
    assert (
        schema["$defs"]["Source"]["required"] == ["path"] and schema["$defs"]["Source"]["additionalProperties"] is False
    )


CONTRADICTIONS = [
    ({"train": [{"path": "a.jsonl", "subset": "x"}]},
     "`data.train[0].subset` has no effect with `data.train[0].path: a.jsonl`"),
    ({"train": [{"path": "folder", "revision": "x"}]}, "`data.train[0].revision` has no effect"),
    ({"train": ["b.csv", {"path": "a.parquet", "split": "test"}]}, "`data.train[1].split` has no effect"),
    ({"train": ["hub:"]}, "has no dataset name"),
    ({"train": [{"path": "a", "name": "n"}, {"path": "b", "name": "n"}]},
     "`data.train[1].name` and `data.train[0].name`"),
    ({"validation": [{"path": "a", "weight": 2}], "validation_fraction": 0.0},
     "`data.validation[0].weight` has no effect"),
    ({"train": [{"path": "a", "format": "text"}]}, "`data.train[0].format: text` does not fit `task: sft`"),
    ({"fields": {"promt": "x"}, "format": "prompt"},
     "`data.fields` has the field promt, which `data.format: prompt` does not have: did you mean prompt?"),
    ({"ignore": ["x"], "fields": {"prompt": "x"}},
     "`data.ignore` ignores the column x, which `data.fields` reads: remove one"),
    ({"ignore": ["text", "question"], "format": "question"},
     "ignores the column question, which `data.format: question` reads"),
    ({"train": [{"path": "a", "ignore": ["x"]}], "fields": {"prompt": "x"}},
     "`data.train[0].ignore` ignores the column x"),
    ({"fields": {"prompt": "x"}, "format": "messages"}, "which `data.format: messages` does not have"),
    ({"fields": {"asked": "x"}}, "which `data.format: auto` does not have"),
    ({"train": [{"path": "a", "format": "alpaca", "fields": {"question": "x"}}]},
     "`data.train[0].fields` has the field question"),
    ({"chat_template_kwargs": {"tools": []}}, "`data.chat_template_kwargs.tools`"),
    ({"date": "2026-02-30"}, "`data.date: 2026-02-30`"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "said"), CONTRADICTIONS)
def test_contradictions_are_named_by_place(data: dict, said: str) -> None:
    findings = check(config(**{f"data__{key}": value for key, value in data.items()}))
    assert len(findings) == 1 and said in findings[0]
