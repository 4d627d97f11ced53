"""``manyhands import``, and starts from another tool's file: what is written, kept and printed."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.importers.load import load_config, load_run
from manyhands.launch.run.file import load_for_start
from manyhands.launch.run.prepare import prepare_run
from tests.support.tiny import write_tiny_model

FILE = """\
model_name_or_path: {model}
dataset_name: {data}
learning_rate: 1e-4
use_peft: true
lora_r: 4
max_length: 64
per_device_train_batch_size: 2
fp16: true
run_name: mine
report_to: wandb
"""


def call(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(tmp_path: Path, text: str = FILE) -> Path:
    path = tmp_path / "sft.yaml"
    path.write_text(text.format(model="org/model", data="org/data"))
    return path


def test_import_writes_a_run_file_that_means_the_same_with_the_origin_of_each_key(tmp_path: Path) -> None:
    foreign, native = write(tmp_path), tmp_path / "run.yaml"
    done = call("import", foreign, "-o", native, "--gpus", 4)
    assert done.exit_code == 0, done.output
    assert "substituted:\n  line 2, `dataset_name`" in done.stdout
    assert "line 8, `fp16` -> model.dtype: bfloat16 (float16 is not available: bfloat16)" in done.stdout
    assert "line 10, `report_to` -> log.wandb: huggingface" in done.stdout and "TRL's default" in done.stdout
    text = native.read_text()
    assert "# line 5, `lora_r`" in text and "batch sizes for 4 GPUs" in text
    assert load_config(native, ["name=sft"]) == load_run(foreign, ["name=sft"], context=_four()).config


def test_no_value_changes_on_its_way_into_the_run_file(tmp_path: Path) -> None:
    """Long ones have a comment behind them, and a name may look like a number."""
    foreign, native = write(tmp_path), tmp_path / "run.yaml"
    text = foreign.read_text().replace("org/model", "organization/a-model-of-a-rather-long-name-7B")
    foreign.write_text(text.replace("mine", "2e-5") + f"output_dir: {tmp_path}/{'long' * 9}/2e-5\n")
    done = call("import", foreign, "-o", native, "--gpus", 4)
    assert done.exit_code == 0, done.output
    assert load_config(native) == load_run(foreign, context=_four()).config


def _four():
    from manyhands.importers.translation import ImportContext

    return ImportContext(count_gpus=lambda: 4)


def test_import_does_not_overwrite(tmp_path: Path) -> None:
    foreign, native = write(tmp_path), tmp_path / "run.yaml"
    native.write_text("mine")
    assert call("import", foreign, "-o", native).exit_code == 2 and native.read_text() == "mine"


def test_import_as_json_has_an_outcome_for_every_key(tmp_path: Path) -> None:
    foreign = write(tmp_path)
    done = call("import", foreign, "--gpus", 1, "--json")
    told = json.loads(done.stdout)
    assert {outcome["key"] for outcome in told["outcomes"]} == set(yaml.safe_load(foreign.read_text()))
    assert told["tool"] == "TRL" and told["native"]["batch"]["samples"] == 2 and told["gpus"] == 1


def test_import_of_what_cannot_be_run_lists_everything_and_writes_nothing(tmp_path: Path) -> None:
    foreign, native = write(tmp_path, FILE + "lr_scheduler_type: polynomial\n"), tmp_path / "run.yaml"
    done = call("import", foreign, "-o", native, "--gpus", 1)
    assert done.exit_code == 1 and not native.exists()
    assert "refused:\n  line 11, `lr_scheduler_type`" in done.stdout and "mapped:" in done.stdout


def test_a_native_file_is_not_imported(tmp_path: Path) -> None:
    native = tmp_path / "run.yaml"
    native.write_text("model: {name: org/model}\ndata: {train: x.jsonl}\n")
    done = call("import", native)
    assert done.exit_code == 2 and "this is already a run file of manyhands" in done.output


def test_a_file_of_settings_is_not_imported_and_not_sent_there(tmp_path: Path) -> None:
    settings, run = tmp_path / "ds.json", tmp_path / "run.yaml"
    settings.write_text('{"zero_optimization": {"stage": 5}}')
    run.write_text("model: {name: org/model}\ndata: {train: x.jsonl}\n")
    refused, imported = call("plan", run, "--deepspeed", settings), call("import", settings)
    assert "got 5, allowed: 0, 1, 2 or 3" in refused.output and "manyhands import" not in refused.output
    assert imported.exit_code == 2 and "this is a file of DeepSpeed" in imported.output
    missing = call("plan", run, "--deepspeed", tmp_path / "no.json")
    assert missing.exit_code == 2 and "run file" not in missing.output and "--deepspeed" in missing.output


def test_strict_refuses_a_tracker_that_is_not_available(tmp_path: Path) -> None:
    done = call("import", write(tmp_path, FILE.replace("fp16: true", "").replace("wandb", "comet_ml")), "--strict")
    assert done.exit_code == 1 and "`report_to`: comet_ml is not available: metrics go to" in done.output


def test_strict_refuses_a_substitution(tmp_path: Path) -> None:
    done = call("train", write(tmp_path), "--strict", "--gpus", 1)
    assert done.exit_code == 2 and "line 8, `fp16`" in done.output and "refused under --strict" in done.output


def test_a_run_keeps_the_file_and_the_fates_and_resumes_with_the_gpus_of_its_first_start(tmp_path: Path) -> None:
    data, model = tmp_path / "pairs.jsonl", tmp_path / "model"
    data.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": f"{i}."}) + "\n" for i in range(24)))
    write_tiny_model(model, "llama")
    foreign = tmp_path / "sft.yaml"
    foreign.write_text(FILE.format(model=model, data="org/data"))
    ours = [f"data.train={data}", f"output.dir={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}"]
    ours += ["model.dtype=float32", "log.wandb=null"]
    loaded = load_for_start(foreign, ours, num_gpus=2)
    assert loaded.config.batch.samples == 4
    prepared = prepare_run(loaded.config, world_size=2, local_world_size=2, origin=loaded, report=lambda _: None)
    prepared.folder.write_status("running")
    prepared.release()
    assert (prepared.folder.origin / "sft.yaml").read_text() == foreign.read_text()
    outcomes = json.loads((prepared.folder.origin / "outcomes.json").read_text())
    assert outcomes["gpus"] == 2 and {"lora_r", "fp16"} <= {outcome["key"] for outcome in outcomes["outcomes"]}
    again = load_for_start(foreign, ours, num_gpus=1)
    assert again.config.batch.samples == 4, "a later start on one GPU has the same global batch"
