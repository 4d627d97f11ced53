"""``manyhands submit``: what is written, what is asked of the site's client, and what a dry run never does."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.config.schema import RunConfig
from manyhands.launch.run.resume import find_run, folder_of
from tests.support.tiny import write_tiny_model


@pytest.fixture
def run_file(tmp_path):
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: job\nmodel: {name: model}\n"
        f"data: {{train: rows.jsonl, cache: {tmp_path / 'cache'}, max_length: 64}}\n"
        f"batch: {{samples: 32}}\noutput: {{dir: {tmp_path / 'runs'}}}\n"
        "submit: {gpus: 2x4xH100, time_limit: 4h, partition: gpu}\n"
    )
    return path


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A machine with clients that write down what they are asked; ``site("sbatch", "Submitted batch job 7")``."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr("shutil.which", lambda name, *_, **__: str(tools / name) if (tools / name).exists() else None)
    monkeypatch.delenv("SYNTH_GPU_TYPE", raising=False)

    def install(name: str, answer: str = "", code: int = 0) -> None:
        tool = tools / name
        tool.write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/asked\necho "{answer}"\nexit {code}\n')
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)

    return install


def call(*arguments):
    return CliRunner().invoke(app, ["submit", *map(str, arguments)])


def asked(tmp_path) -> list[str]:
    file = tmp_path / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_the_job_is_made_from_the_plan(run_file, tmp_path, site, monkeypatch):
    """Without the client of the cluster the file is written all the same, and the command is named."""
    rehearsed = []
    monkeypatch.setattr("manyhands.submit.prepare.rehearse", lambda config, plan: rehearsed.append(plan))
    write_tiny_model(tmp_path / "model", "llama")
    result = call(run_file, "--to", "slurm")
    script = tmp_path / "runs" / "job" / "submit" / "slurm.sh"
    assert result.exit_code == 1
    assert f"sbatch is not installed here\n  where: {script}\n  fix: where it is, run: sbatch {script}" in result.stderr
    assert "2 machines with 4 × H100-80GB, ddp" in result.stderr and "2 steps, at most 4.0 h" in result.stderr
    assert [plan.layout.world_size for plan in rehearsed] == [8] and "--gres=gpu:h100:4" in script.read_text()
    config = RunConfig.model_validate_json((script.parent / "run-1.json").read_text())
    assert config.parallel.gpus == 8 and config.model.name == str(tmp_path / "model")
    assert find_run(folder_of(config), config) == "new", "the job finds the run's folder as good as empty"


def test_a_dry_run_prints_the_file_and_submits_nothing(run_file, tmp_path, site, monkeypatch):
    site("sbatch", "sbatch: Job 7 to start")
    site("kubectl")
    site("sky")
    result = call(run_file, "--to", "slurm", "--dry-run", "--no-plan")
    script = tmp_path / "runs" / "job" / "submit" / "slurm.sh"
    assert result.exit_code == 0 and result.stdout == script.read_text()
    assert "Job 7 to start" in result.stderr and "nothing was submitted" in result.stderr
    assert asked(tmp_path) == [f"sbatch --test-only {script}"]
    config = script.with_name("run-1.json").read_text()
    volume = ("submit.volumes={/mnt/runs: claim}", "output.dir=/mnt/runs", "submit.image=image")
    on_hub = ("model.name=org/model", "data.train=hub:org/rows")
    monkeypatch.chdir(tmp_path)
    for to in ("kubernetes", "skypilot"):
        assert call(run_file, "--to", to, "--dry-run", "--no-plan", *volume, *on_hub).exit_code == 0
    assert len(asked(tmp_path)) == 1
    assert script.with_name("run-1.json").read_text() == config, "the script may have been submitted by hand"


def test_the_client_s_answer_is_shown_and_kept(run_file, tmp_path, site):
    site("sbatch", "Submitted batch job 7")
    folder = tmp_path / "runs" / "job" / "submit"
    for _ in range(2):
        result = call(run_file, "--to", "slurm", "--no-plan", "submit.options=[--qos=high]")
        assert (result.exit_code, result.stdout) == (0, "Submitted batch job 7\n")
    assert asked(tmp_path) == [f"sbatch {folder / 'slurm.sh'}"] * 2
    logged = [json.loads(line) for line in (folder / "jobs.jsonl").read_text().splitlines()]
    assert [(entry["number"], entry["answer"]) for entry in logged] == [
        (1, "Submitted batch job 7"),
        (2, "Submitted batch job 7"),
    ]


def test_a_secret_that_is_not_set_here(run_file, tmp_path, site, monkeypatch):
    site("sbatch", "Submitted batch job 7")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    arguments = (run_file, "--to", "slurm", "--no-plan", "submit.secrets={HF_TOKEN: any}")
    result = call(*arguments)
    assert result.exit_code == 2 and "HF_TOKEN is not set in this shell" in result.stderr and not asked(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert call(*arguments).exit_code == 0 and len(asked(tmp_path)) == 1


def test_a_client_that_refuses(run_file, tmp_path, site):
    site("sbatch", "sbatch: error: invalid partition specified: gpu", code=1)
    result = call(run_file, "--to", "slurm", "--no-plan")
    assert (
        result.exit_code == 1 and "sbatch did not take the job\n  - sbatch: error: invalid partition" in result.stderr
    )
    folder = tmp_path / "runs" / "job" / "submit"
    assert "invalid partition" in json.loads((folder / "jobs.jsonl").read_text())["answer"]
    site("sbatch", "Submitted batch job 7")
    assert call(run_file, "--to", "slurm", "--no-plan", "stop.epochs=2").exit_code == 0
    epochs = [json.loads((folder / f"run-{n}.json").read_text()).get("stop", {}).get("epochs") for n in (1, 2)]
    assert epochs == [None, 2], "what has been submitted before stays as it was"


def test_kubectl_and_sky_get_the_options_and_no_secret(run_file, tmp_path, site, monkeypatch):
    site("kubectl", "trainjob created")
    site("sky", "job 3")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(tmp_path)
    keys = ("submit.volumes={/mnt/runs: claim}", "output.dir=/mnt/runs", "submit.image=image", "submit.options=[--x=1]")
    keys += ("model.name=org/model", "data.train=hub:org/rows", "submit.secrets={HF_TOKEN: hf}")
    for to in ("kubernetes", "skypilot"):
        assert call(run_file, "--to", to, "--no-plan", *keys).exit_code == 0
    files = tmp_path / "runs" / "job" / "submit"  # the volume is not mounted here
    assert asked(tmp_path) == [
        f"kubectl create --x=1 --filename={files / 'trainjob.yaml'}",
        f"sky jobs launch --yes --detach-run --secret=HF_TOKEN --x=1 {files / 'skypilot.yaml'}",
    ]
    assert not [file for file in files.iterdir() if "hf_secret" in file.read_text()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the kind of cluster is not given"),
        (("--to", "slurm", "submit.gpus=null"), "which GPUs to ask for is not given"),
        (("--to", "slurm", "parallel.gpus=4"), "the run takes 4 of 8 GPUs"),
        (("--to", "slurm", "--gpus", "8xH200", "parallel.gpus=4"), "--gpus and parallel.gpus are both given"),
        (("--to", "slurm", "--gpus", "8xH1"), "unknown kind of GPU"),
        (("--to", "slurm", "submit.time_limit=soon"), "submit.time_limit"),
        (("--to", "slurm", "submit.partition=a\nb"), "submit.partition"),
    ],
)
def test_what_is_refused_before_anything_is_written(run_file, tmp_path, site, arguments, words):
    result = call(run_file, "--no-plan", *arguments)
    assert result.exit_code == 2 and words in result.stderr, result.stderr
    assert not (tmp_path / "runs").exists()


def test_keys_of_other_clusters_are_named_once(run_file, site):
    result = call(run_file, "--to", "slurm", "--dry-run", "--no-plan", "submit.namespace=ml")
    assert result.stderr.count("note: submit.namespace has no effect with --to slurm") == 1


def test_a_file_of_another_tool_asks_for_its_own_gpus(tmp_path, site):
    """synth-ai's guide: a preview without submitting."""
    file = Path(__file__).parents[2] / "examples" / "multi_gpu_qlora_4xh100.toml"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "question", "completion": "answer"}) + "\n")
    keys = (f"data.train={tmp_path / 'rows.jsonl'}", f"output.dir={tmp_path / 'runs'}", "name=sft")
    result = call(file, "--to", "slurm", "--dry-run", "--no-plan", *keys)
    assert result.exit_code == 0 and "#SBATCH --gres=gpu:h100:4\n" in result.stdout, result.stderr
    config = RunConfig.model_validate_json((tmp_path / "runs" / "sft" / "submit" / "run-1.json").read_text())
    assert (config.batch.samples, config.parallel.gpus) == (64, 4), "the job has our keys"


def test_a_finished_run_is_not_submitted(run_file, tmp_path, site):
    site("sbatch", "Submitted batch job 7")
    call(run_file, "--to", "slurm", "--no-plan")
    config = RunConfig.model_validate_json((tmp_path / "runs" / "job" / "submit" / "run-1.json").read_text())
    folder = folder_of(config)
    folder.write_config(config)
    folder.write_status("finished")
    result = call(run_file, "--to", "slurm", "--no-plan")
    assert result.exit_code == 2 and "this run is finished" in result.stderr and len(asked(tmp_path)) == 1


def test_the_command_for_a_path_with_spaces_can_be_pasted(run_file, tmp_path, site):
    result = call(run_file, "--to", "slurm", "--no-plan", f"output.dir={tmp_path}/my runs")
    assert f"run: sbatch '{tmp_path}/my runs/job/submit/slurm.sh'" in result.stderr
