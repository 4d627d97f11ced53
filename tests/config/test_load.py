"""Run files as people write them: the three syntaxes, their traps, overrides, paths, and every error at once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from manyhands.config.read import dump_yaml, parse_yaml_value
from manyhands.core.errors import EXIT_USAGE, UserError
from manyhands.importers.load import MAX_FINDINGS, config_from_mapping, load_config
from tests.config.builders import minimal

BASE = "model: {name: org/model}\ndata: {train: rows.jsonl}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as raised:
        load_config(path, overrides)
    assert raised.value.exit_code == EXIT_USAGE
    return raised.value


def test_three_syntaxes_give_the_same_run(tmp_path):
    yaml = write(tmp_path, BASE + "batch:\n  samples: 8\n")
    toml = write(
        tmp_path, '[model]\nname = "org/model"\n[data]\ntrain = "rows.jsonl"\n[batch]\nsamples = 8\n', "run.toml"
    )
    jsonf = write(tmp_path, json.dumps(minimal(name="run", batch__samples=8)), "run.json")
    assert load_config(yaml) == load_config(toml) == load_config(jsonf)
    assert load_config(yaml).digest == load_config(jsonf).digest


def test_the_dumped_config_loads_again(tmp_path):
    config = load_config(
        write(tmp_path, BASE + "method: {name: full}\nbatch: {loss_tokens: 500}\nschedule: {warmup_steps: 0}\n")
    )
    assert load_config(write(tmp_path, config.model_dump_json(), "again.json")).digest == config.digest


@pytest.mark.parametrize(("stem", "name"), [("run", "run"), ("my run", "my-run"), (".hidden", "hidden"), ("é", "run")])
def test_the_name_defaults_to_the_stem(tmp_path, stem, name):
    assert load_config(write(tmp_path, BASE, f"{stem}.yaml")).name == name


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("2.5e-5", 2.5e-5), (".001", 1e-3), ("1.", 1.0), ("auto", "auto")],
)
def test_numbers_that_yaml_1_1_takes_for_text(tmp_path, text, rate):
    assert (
        load_config(write(tmp_path, BASE + f"optimizer: {{learning_rate: {text}}}\n")).optimizer.learning_rate == rate
    )


def test_words_that_yaml_1_1_takes_for_truth_values(tmp_path):
    config = load_config(write(tmp_path, "name: no\nmodel: {name: on}\ndata: {train: yes, packing: no}\n"))
    assert (config.name, config.model.name, config.data.train, config.data.packing) == ("no", "on", "yes", False)


def test_octal_dates_and_sixties_are_no_surprise(tmp_path):
    config = load_config(write(tmp_path, "name: 2024-01-02\nseed: 010\nmodel: {name: 1:30}\ndata: {train: x}\n"))
    assert (config.name, config.seed, config.model.name) == ("2024-01-02", 10, "1:30")


def test_all_errors_of_a_file_at_once_with_their_lines(tmp_path):
    path = write(
        tmp_path,
        "modle: x\nmodel:\n  name: a\ndata:\n  trian: b\nbatch:\n  samples: 0\n"
        "optimizer:\n  lr: 1e-4\n  learning_rate: fast\n"
        "schedule: {warmup_ratio: 0.1, warmup_steps: 5}\n",
    )
    error = refusal(path, "stop.epoch=3")
    text = str(error)
    assert error.what == "the run file has 8 errors" and len(error.details) == 8 and str(path) in text
    assert "line 1: unknown key `modle`: did you mean `model`?" in text
    assert "line 5: unknown key `data.trian`: did you mean `data.train`?" in text
    assert "`data.train` is missing. Training data: a path" in text
    assert "line 7: `batch.samples`: got 0, allowed: an integer >= 1 or `auto`. Samples in the global batch" in text
    assert "unknown key `optimizer.lr`: here it is `optimizer.learning_rate`." in text
    assert "`optimizer.learning_rate`: got fast, allowed: a number > 0 or `auto`" in text
    assert "command line: unknown key `stop.epoch`: did you mean `stop.epochs`?" in text
    assert "`schedule.warmup_ratio` and `schedule.warmup_steps`" in text


def test_keys_below_an_unknown_section_are_listed(tmp_path):
    text = "training:\n  batch_size: 4\n  lr: 1e-4\n  zzz: {a: 1}\nevaluation:\n  every_steps: 5\ncompute: {gpus: 2}\n"
    error = refusal(write(tmp_path, BASE + text))
    for finding in (
        "line 3: unknown section `training`",
        "line 4: unknown key `training.batch_size`: in other tools it counts one GPU",
        "line 5: unknown key `training.lr`: here it is `optimizer.learning_rate`",
        "line 6: unknown key `training.zzz`; ",
        "line 7: unknown section `evaluation`: did you mean `evaluate`?",
        "line 8: unknown key `evaluation.every_steps`: write `evaluate.every_steps`",
        "line 9: unknown section `compute`",
        "line 9: unknown key `compute.gpus`: did you mean `parallel.gpus`?",
    ):
        assert any(detail.startswith(finding) for detail in error.details), finding
    assert len(error.details) == 8


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task=dpo", "got dpo (write preference)"),
        ("method.name=dora", "lora with dora: true"),
        ("model.dtype=fp16", "float16 is not supported"),
        ("optimizer.name=adamw_torch", "write adamw"),
        ("parallel.strategy=full_shard", "write fsdp"),
        ("parallel.activation_checkpointing=true", "write full"),
    ],
)
def test_values_of_other_tools_lead_to_ours(tmp_path, override, words):
    assert words in str(refusal(write(tmp_path, BASE), override))


def test_many_errors_are_cut(tmp_path):
    error = refusal(write(tmp_path, BASE + "".join(f"nonsense_{i}: 1\n" for i in range(30))))
    assert (
        error.what == "the run file has 30 errors"
        and len(error.details) == MAX_FINDINGS + 1
        and error.details[-1] == "and 10 more"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch: {samples: true}", "got true, allowed: an integer"),
        ("batch: 3", "`batch` is a section with keys, got 3"),
        ("batch.samples: 3", "write `batch:` and below it `samples: 3`"),
        ("name: 2024", "Quote it"),
        ("name: ../up", "`name`: got ../up"),
        ("seed: -1", "`seed`: got -1, allowed: an integer >= 0"),
        ("stop: {epochs: .inf}", "`stop.epochs`"),
        ("method: {target_modules: 3}", "`method.target_modules`: got 3, allowed: `all-linear`, `peft-default`"),
        ("task: stf", "`task`: got stf, allowed: `sft`, `cpt`"),
        ("1: x", "unknown key `1`"),
        ("batch: {? [a, b] : 1}", "unhashable"),
    ],
)
def test_wrong_values_say_what_is_allowed(tmp_path, text, said):
    assert said in str(refusal(write(tmp_path, BASE + text + "\n")))


def test_an_empty_section_is_its_defaults(tmp_path):
    assert load_config(write(tmp_path, BASE + "batch:\n")).batch.samples == "auto"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", BASE + "seed: 1\nseed: 2\nbatch:\n  samples: 1\n  samples: 2\n",
         ["line 4, column 1: duplicate key `seed`", "line 7, column 3: duplicate key `samples`"]),
        ("a.json", '{"name": "a", "name": "b"}', ["duplicate key `name`"]),
        ("a.toml", 'name = "a"\nname = "b"\n', ["not valid TOML", "line 2"]),
        ("a.yaml", "model:\n\tname: x\n", ["not valid YAML", "line 2, column 1", "spaces"]),
        ("a.yaml", "model: [a\ndata: b\n", ["not valid YAML", "line 2"]),
        ("a.yaml", "model: !!python/object:os.system x\n", ["not valid YAML", "line 1"]),
        ("a.yaml", "a: 1\n---\nb: 2\n", ["not valid YAML", "line 2"]),
        ("a.yaml", "a: \x00\n", ["character", "line 1"]),
        ("a.json", '{"name": "a",\n "seed": }', ["not valid JSON", "line 2, column 10"]),
        ("a.toml", "name = \n", ["not valid TOML", "line 1"]),
        ("a.yaml", "", ["empty"]),
        ("a.yaml", "# only words\n", ["empty"]),
        ("a.json", " ", ["empty"]),
        ("a.json", "{}", ["empty"]),
        ("a.yaml", "- model\n", ["the run file is a list"]),
        ("a.json", "3", ["single value"]),
        ("a.txt", "x", ["a data file, not a run file", "data.train"]),
        ("a.yaml.bak", "x", [".yaml, .yml, .toml, .json"]),
        ("a.yaml", "[" * 1500, ["not valid YAML", "nested"]),
        ("a.json", "[" * 200000, ["not valid JSON", "nested"]),
        ("a.json", '{"name": ' + "[" * 100 + "]" * 100 + "}", ["nested more than"]),
        ("a.toml", "a = " + "[" * 100 + "]" * 100, ["nested more than"]),
        ("a.toml", "seed = " + "9" * 5000, ["not valid TOML"]),
        ("a.yaml", "model: &a {name: *a}\n",
         ["not valid YAML", "line 1, column 8", "refers to a value that contains it"]),
        ("a.yaml", "&a\nmodel: {name: m}\ndata: *a\n", ["line 1", "refers to a value that contains it"]),
        ("a.yaml", "model: &a {name: m, <<: *a}\n", ["line 1", "refers to a value that contains it"]),
        ("a.yaml", "seed: !!bool maybe\n", ["line 1, column 7", "'maybe' is not a bool", "without a tag"]),
        ("a.yaml", "seed: !!timestamp soon\n", ["line 1, column 7", "timestamp", "without a tag"]),
        ("a.yaml", 'output: {dir: "a\\0b"}\n', ["contains the invalid character '\\x00'"]),
        ("a.json", '{"output": {"dir": "\\ud800"}}', ["contains the invalid character '\\ud800'"]),
    ],
)  # fmt: skip
def test_broken_files_say_where(tmp_path, name, text, said):
    message = str(refusal(write(tmp_path, text, name)))
    assert name in message
    for words in said:
        assert words in message


def _fold(first: str, each: str, levels: int = 40) -> str:
    """``levels`` lines that each name the one before nine times: 9^levels values in two kilobytes."""
    lines = [f"a0: &a0 {first}"]
    return "\n".join(
        lines + [f"a{i}: &a{i} " + each.replace("?", ", ".join([f"*a{i - 1}"] * 9)) for i in range(1, levels)]
    )


@pytest.mark.parametrize("text", [_fold("[x]", "[?]"), _fold("{x: 1}", "{<<: [?]}")], ids=["aliases", "merges"])
def test_aliases_that_unfold_without_end_are_refused(tmp_path, text):
    assert "aliases (*) expand to more than" in str(refusal(write(tmp_path, text)))
    assert "`data.chat_template_kwargs`: got" in str(
        refusal(write(tmp_path, BASE), "data.chat_template_kwargs=" + "{x: &a [1], y: &b [*a, *b]}")
    )


def test_places_that_an_alias_shares_are_read_apart(tmp_path):
    """One wrong key in a branch that stands at two places is named at both."""
    message = str(refusal(write(tmp_path, "model: &a {name: m, trian: x}\ndata: *a\n")))
    assert "`model.trian`" in message and "`data.trian`" in message and "`data.name`" in message


def test_what_is_no_file_of_text_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "not a regular file" in str(refusal(tmp_path / "pipe.yaml"))
    with open(tmp_path / "long.yaml", "wb") as file:
        file.truncate(1 << 40)
    assert "too large" in str(refusal(tmp_path / "long.yaml")) and "data.train" in str(refusal(tmp_path / "long.yaml"))
    assert "cannot be read" in str(refusal(Path("a\0b.yaml")))


def test_a_home_that_nobody_has_is_named_with_its_key(tmp_path):
    overrides = ["output.dir=~nosuchuser/runs", "data.cache=~nosuchuser/cache", "data.train=~nosuchuser/rows.jsonl"]
    error = refusal(write(tmp_path, BASE), *overrides)
    assert len(error.details) == 3 and all("'nosuchuser'" in detail for detail in error.details)
    assert "`output.dir: ~nosuchuser/runs`" in error.details[1] + error.details[0]


def test_a_path_that_is_too_long_is_named_with_its_key(tmp_path):
    keys = ("output.dir", "data.cache", "data.train", "model.name", "model.chat_template", "method.adapter")
    error = refusal(write(tmp_path, BASE), *(f"{key}={'long' * 100}" for key in keys))
    assert len(error.details) == 6 and all("File name too long" in detail for detail in error.details)


def test_an_override_that_is_not_text_is_named(tmp_path):
    assert "is not UTF-8 text" in str(refusal(write(tmp_path, BASE), os.fsdecode(b"output.dir=\xff")))


def test_a_missing_file_names_its_neighbours(tmp_path):
    write(tmp_path, BASE, "other.yaml")
    message = str(refusal(tmp_path / "run.yaml"))
    assert "does not exist" in message and "other.yaml" in message
    assert "folder" in str(refusal(tmp_path))


def test_a_file_that_is_not_utf_8(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"name: \xff\xfe\n")
    assert "UTF-8" in str(refusal(tmp_path / "run.yaml"))


def test_a_byte_order_mark_is_no_error(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert load_config(tmp_path / "run.yaml").model.name == "org/model"


@pytest.mark.parametrize("value", ["2e-5", "1.5e3", "08", "-7", "null", "no", "12:30", "2026-01-01", 2e-5, 1e22, None])
def test_what_is_written_is_read_as_it_was(value):
    assert parse_yaml_value(dump_yaml(value)) == value and parse_yaml_value(dump_yaml([value])) == [value]


def test_numbers_in_a_mapping_to_text_are_named(tmp_path):
    text = str(refusal(write(tmp_path, BASE), "submit.environment.NCCL_IB_DISABLE=1"))
    assert "allowed: a mapping, such as {a: b}, of text, with names that match" in text and "]*$. Quote 1." in text


def test_overrides_replace_and_the_later_one_wins(tmp_path):
    path = write(tmp_path, BASE + "batch: {samples: 8}\n")
    overrides = """
        batch.samples=16
        batch.samples=32
        name=2024
        optimizer.learning_rate=1e-4
        method.target_modules=[q_proj, '*.v_proj']
        data.train=a=b.jsonl
        model.revision=1e5
        --stop.max_steps=3
        data.packing=false
        output.dir="my runs"
    """
    config = load_config(path, [line.strip() for line in overrides.strip().splitlines()])
    assert (config.batch.samples, config.name, config.optimizer.learning_rate) == (32, "2024", 1e-4)
    assert config.method.target_modules == ("q_proj", "*.v_proj")
    assert (config.data.train, config.model.revision, config.stop.max_steps) == ("a=b.jsonl", "1e5", 3)
    assert (config.data.packing, config.output.dir) == (False, "my runs")


def test_null_takes_a_key_back(tmp_path):
    path = write(tmp_path, BASE + "stop: {max_steps: 5}\n")
    assert load_config(path, ["stop.max_steps=null"]).stop.max_steps is None
    assert load_config(path, ["stop.max_steps="]).stop.max_steps is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("batch.samples", "write batch.samples=VALUE"),
        ("batch.sample", "write section.key=value, such as batch.samples=32"),
        ("batch=3", "`batch` is a section"),
        ("batch.sample=3", "did you mean `batch.samples`?"),
        ("batch.samples=many", "command line: `batch.samples`: got many, allowed"),
        ("data.max_length=[", "`data.max_length`: got [, allowed"),
        ("zzz.qqq=1", "`manyhands config` lists all keys"),
        ("data.train={path: a.jsonl, weight: 2}", "write a single source as a list too, `train: [{path: ...}]`"),
    ],
)
def test_bad_overrides_say_what_is_expected(tmp_path, override, said):
    assert said in str(refusal(write(tmp_path, BASE), override))


def test_paths_are_taken_from_the_run_files_folder_if_they_are_there(tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    (folder / "org" / "model").mkdir(parents=True)
    (folder / "rows.jsonl").write_text("{}")
    path = write(folder, BASE)
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("runs/run.yaml"), ["data.validation=elsewhere.jsonl"])
    assert config.model.name == str(folder / "org" / "model")
    assert config.data.train == str(folder / "rows.jsonl")
    assert config.data.validation == "elsewhere.jsonl"
    assert load_config(path).data.train == config.data.train


def test_a_chat_template_may_be_text(tmp_path):
    template = "{% for m in messages %}" + "x" * 5000 + "{% endfor %}"
    assert config_from_mapping(minimal(model__chat_template=template)).model.chat_template == template
    assert (
        load_config(write(tmp_path, json.dumps(minimal(model__chat_template=template)), "a.json")).model.chat_template
        == template
    )


def test_a_mapping_is_not_changed_and_its_errors_name_the_place():
    mapping = minimal(batch__row=1)
    with pytest.raises(UserError, match="error") as raised:
        config_from_mapping(mapping, where="a notebook")
    assert raised.value.where == "a notebook" and mapping == minimal(batch__row=1)


def test_a_window_in_which_no_loss_could_be_called_a_spike_is_refused(tmp_path):
    error = refusal(write(tmp_path, BASE + "guards: {spike_window: 15}\n"))
    assert "guards.spike_window" in str(error) and "16" in str(error)


def test_findings_are_in_the_order_of_their_lines(tmp_path):
    text = (
        "model: {name: m}\nstop: {max_step: 3}\nbatch:\n  samples: many\n  loss_tokens: 5\n"
        "data: {train: a.jsonl, x: 1}\n"
        "zzz: 3\noptimizer:\n  learning_rate: hot\n"
    )
    error = refusal(write(tmp_path, text), "seed=x", "nope=1")
    found = [re.match(r"line (\d+)", detail) for detail in error.details]
    lines = [int(match[1]) for match in found if match]
    assert lines == sorted(lines) == [2, 4, 6, 7, 9], error
    assert [detail for detail in error.details[-2:] if detail.startswith("command line")] == list(error.details[-2:])
