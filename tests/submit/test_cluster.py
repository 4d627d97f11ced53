"""Jobs on a real SLURM cluster of two nodes: what sbatch takes, a run over both, a notice, a requeue, wrong starts."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.submit.slurm import write_script
from tests.submit.test_job import describe
from tests.support.slurm import Slurm, two_nodes, why_not
from tests.support.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TRAIN = f"{shlex.quote(sys.executable)} -m manyhands train"
WORKER = f"{shlex.quote(sys.executable)} -u -m manyhands.worker"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(f"no SLURM cluster: {reason}")
    with two_nodes(tmp_path_factory.mktemp("slurm")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def run_file(tmp_path, model) -> Path:
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: job\nmodel: {{name: {model}}}\n"
        f"data: {{train: rows.jsonl, cache: {tmp_path / 'cache'}, max_length: 64}}\n"
        "batch: {samples: 8}\nstop: {max_steps: 12, epochs: 100}\nlog: {tensorboard: false}\n"
        "evaluate: {every_steps: 0, at_start: false, prompts: 0}\ncheckpoint: {every_steps: 0}\n"
        f"output: {{dir: {tmp_path / 'my runs'}}}\n"
        "submit: {gpus: 2x1xH200, cpus_per_gpu: 1, partition: gpu, time_limit: 30m}\n"
    )
    return path


def steps_of(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [row["step"] for row in rows if row["kind"] == "step"]


def test_sbatch_takes_the_script_and_notices_faults(cluster, tmp_path):
    """`sbatch --test-only`, as a dry run asks."""
    keys = {"submit.partition": "gpu", "submit.time_limit": "1h", "submit.options": ("--comment=ours",)}
    script = tmp_path / "slurm.sh"

    def ask(gpus: str = "2x2xH200", **more: object) -> str:
        script.write_text(write_script(describe(tmp_path, gpus, **{**keys, "submit.cpus_per_gpu": 1, **more})))
        done = cluster.run("sbatch", "--test-only", str(script), check=False)
        return "" if done.returncode == 0 else done.stderr

    assert ask() == ""
    assert "unrecognized option '--no-such=1'" in ask(**{"submit.options": ("--no-such=1",)})
    assert "Requested node configuration is not available" in ask("3x2xH200")
    assert "Requested node configuration is not available" in ask("2x2xB200")
    assert "invalid partition" in ask(**{"submit.partition": "none"})


def test_a_run_over_two_nodes_is_noticed_queued_again_and_resumed(cluster, run_file, tmp_path):
    """Submitted by the command, stopped by SIGUSR1 as before a time limit, finished by the second start. The notice
    comes before the first step, which is taken all the same.
    """
    run = tmp_path / "my runs" / "job"
    answer = cluster.run(sys.executable, "-m", "manyhands", "submit", str(run_file), "--to", "slurm", "--no-plan")
    job = int(answer.stdout.split()[-1])
    log, deadline = run / "submit" / f"slurm-{job}.log", time.monotonic() + 300
    while len(list(run.glob("logs/rank-*.log"))) < 2:
        assert time.monotonic() < deadline and cluster.show(job)["JobState"] in ("PENDING", "RUNNING"), log.read_text()
        time.sleep(0.2)
    cluster.run("scancel", "--signal=USR1", str(job))
    ended = cluster.wait(job)
    text = log.read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), text
    assert steps_of(run) == list(range(1, 13)), "no step is lost and none is done twice"
    assert f"job {job} is queued again" in text and "[train] Resuming from step" in text
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"{WORKER} RUN", "SLURM job"),
        (f"srun {TRAIN} RUN", "srun has started it several times there"),
        (f"{TRAIN} RUN", "would use one node of this job"),
        (f"srun --nodes=1 --ntasks=1 {WORKER} RUN", "1 of 2 GPUs of this node would be idle"),
    ],
    ids=["worker without srun", "train in every task", "train without srun", "one task for two GPUs"],
)
def test_starts_that_would_train_alone_are_refused_by_name(cluster, run_file, tmp_path, command, words):
    """The first waited for tasks that never came, the second let one task train alone."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{command.replace('RUN', str(run_file))}\n")
    log = tmp_path / "log"
    options = ("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:h200:2", f"--output={log}")
    ended = cluster.wait(cluster.submit(*options, str(script)))
    assert ended["JobState"] == "FAILED" and words in log.read_text()
    assert not (tmp_path / "my runs").exists()
