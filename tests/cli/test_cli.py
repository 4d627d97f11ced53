"""The command line up to the seams of the other rooms; a few real processes for what only they show."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

import manyhands
from manyhands.cli import machine, process
from manyhands.cli.export import default_output
from manyhands.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE, UserError
from manyhands.facts.gpu_kinds import describe_host, parse_gpus
from manyhands.facts.host import read_host_facts
from manyhands.facts.types import UnusableGpus
from tests.cli.conftest import call

SOURCE = Path(__file__).parents[2] / "src"


def start_process(*arguments, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    options |= {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], **options)


@pytest.fixture
def processes(monkeypatch):
    """Modules that would be started, in place of starting them."""
    calls = []
    monkeypatch.setattr(process, "run_module", lambda module, arguments: calls.append((module, list(arguments))) or 7)
    return calls


def test_train_hands_the_config_to_the_launcher(run_file, started):
    result = call(
        "train", run_file, "batch.samples=32", "--gpus", 2, "stop.max_steps=5", "--examples", 10, "--dry-run", "--fresh"
    )
    assert result.exit_code == 0, result.output
    ((config, options),) = started
    assert (config.batch.samples, config.parallel.gpus) == (32, 2)
    assert (config.stop.max_steps, config.data.max_samples) == (5, 10)
    assert options == {"dry_run": True, "fresh": True, "verbose": False, "price": None}


@pytest.mark.parametrize(
    ("command", "fix"), [(("train", "--model", "m"), "write data.train=[a"), (("eval", "run"), "leave one of them out")]
)
def test_an_option_of_one_value_that_is_given_twice_is_refused(command, fix):
    """The first file of data would not be read, and nobody would notice."""
    result = call(*command, "--data", "a.jsonl", "--data=b.jsonl")
    assert result.exit_code == EXIT_USAGE and f"where: manyhands {command[0]}" in result.stderr
    assert "error: --data is given twice" in result.stderr and f"fix: {fix}" in result.stderr


def test_the_launchers_exit_code_is_ours(run_file, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "manyhands.launch.local.start", types.SimpleNamespace(start=lambda config, **_: 143)
    )
    assert call("train", run_file).exit_code == 143


def test_a_user_error_is_words_on_stderr_and_its_exit_code(run_file):
    result = call("train", run_file, "batch.sample=3")
    assert result.exit_code == EXIT_USAGE and result.stdout == ""
    assert result.stderr.startswith("error: ") and "batch.samples" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (UserError("rank 1 failed", exit_code=EXIT_FAILED), EXIT_FAILED, "error: rank 1 failed\n"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "interrupted\n"),
        (ZeroDivisionError("a bug"), 1, ""),
    ],
)
def test_what_a_launch_raises_is_words_and_a_code_and_a_bug_keeps_its_traceback(
    run_file, monkeypatch, error, exit_code, said
):
    def fail(config, **options):
        raise error

    monkeypatch.setitem(sys.modules, "manyhands.launch.local.start", types.SimpleNamespace(start=fail))
    result = call("train", run_file)
    assert (result.exit_code, result.stderr) == (exit_code, said)
    assert said or result.exception is error


def test_an_export_passes_on_its_dtype_and_the_type_of_a_gguf_file(tmp_path, processes):
    from manyhands.export.__main__ import parse_arguments

    assert call("export", tmp_path, "--output", "out", "--merge", "--dtype", "fp16").exit_code == 7
    assert call("export", tmp_path, "--gguf", "Q4_K_M", "--llama-cpp", "llama.cpp").exit_code == 7
    assert {module for module, _ in processes} == {"manyhands.export"}
    dtype, gguf = (parse_arguments(arguments) for _, arguments in processes)
    assert (dtype.dtype, dtype.merge, dtype.gguf, dtype.output) == ("float16", True, None, Path("out"))
    assert (gguf.dtype, gguf.gguf, gguf.llama_cpp) == ("auto", "q4_k_m", Path("llama.cpp"))
    assert gguf.output.name == "gguf-q4_k_m-" + tmp_path.name, "of a checkpoint, in its run's folder"


def test_options_of_an_export_that_mean_nothing_are_refused(tmp_path, processes):
    for arguments, said in (
        (("--dtype", "q8_0"), "types of a GGUF file, such as q8_0, go to --gguf"),
        (("--llama-cpp", "llama.cpp"), "--llama-cpp is for --gguf"),
    ):
        result = call("export", tmp_path, *arguments)
        assert result.exit_code == EXIT_USAGE and said in result.stderr
    assert not processes


def test_an_export_goes_into_the_runs_folder(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-000010"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run.json").write_text("{}")
    assert default_output(tmp_path, merge=False) == tmp_path / "export"
    assert default_output(checkpoint, merge=True) == tmp_path.resolve() / "merged-step-000010"


@pytest.mark.parametrize("command", ["chat", "export", "tensorboard"])
def test_a_missing_folder_is_an_error(command, tmp_path):
    result = call(command, tmp_path / "none")
    assert result.exit_code == EXIT_USAGE and "there is no such file or folder" in result.stderr


def test_tensorboard_is_bound_to_loopback(tmp_path, processes):
    assert call("tensorboard", tmp_path, "--port", _free_port()).exit_code == 7
    arguments = processes[0][1]
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1" and str(tmp_path) in arguments


def test_a_port_in_use_is_an_error_that_names_another(tmp_path, processes):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = call("tensorboard", tmp_path, "--port", port)
    assert result.exit_code == EXIT_USAGE and f"port {port} is in use" in result.stderr and "--port" in result.stderr
    assert not processes


def test_config_explains(capsys):
    listing = call("config").stdout
    assert "batch.samples" in listing and "output.merge" in listing
    assert "Samples in the global batch" in call("config", "batch.samples").stdout
    wrong = call("config", "batch.sample")
    assert wrong.exit_code == EXIT_USAGE and "did you mean `batch.samples`?" in wrong.stderr
    assert "model" in json.loads(call("config", "--schema").stdout)["properties"]


def test_version():
    assert call("--version").stdout == f"manyhands {manyhands.__version__}\n"


def test_the_doctors_exit_code_is_real(monkeypatch):
    CheckResult = machine.CheckResult
    monkeypatch.setattr(
        machine, "CHECKS", (lambda: iter([CheckResult("ok", "fine"), CheckResult("warning", "slow", "buy more")]),)
    )
    result = call("doctor")
    assert result.exit_code == 0 and "slow -> buy more" in result.stdout and "0 missing, 1 warning" in result.stdout
    monkeypatch.setattr(machine, "CHECKS", (lambda: iter([CheckResult("bad", "no torch", "pip install torch")]),))
    assert call("doctor").exit_code == EXIT_FAILED


def test_the_doctor_finds_what_is_here(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://user:secret@127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    checks = (
        machine._check_python,
        machine._check_packages,
        machine._check_folders,
        machine._check_hub,
    )
    findings = [finding for check in checks for finding in check()]
    assert not [finding for finding in findings if finding.state == "bad"]
    (hub,) = [finding for finding in findings if "hub 127" in finding.text]
    assert hub.state == "warning" and "secret" not in hub.text


def test_the_doctor_names_gpus_that_cannot_be_used(monkeypatch):
    broken = UnusableGpus(
        found="1 AMD GPU (/dev/dri/renderD128)", why="no permission to open /dev/kfd", fix="join render"
    )
    facts = read_host_facts({"CUDA_VISIBLE_DEVICES": ""}).model_copy(update={"unusable_gpus": broken})
    monkeypatch.setattr("manyhands.facts.host.read_host_facts", lambda: facts)
    probe = types.SimpleNamespace(returncode=0, stdout="ROCm 7.1 0\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *given, **options: probe)
    (finding,) = machine._check_torch()
    assert finding.state == "bad" and "none can be used: no permission" in finding.text and finding.fix == "join render"


def test_the_doctor_tells_what_is_known_of_the_gpus(monkeypatch):
    facts = describe_host(parse_gpus("2xH200"))
    monkeypatch.setattr("manyhands.facts.host.read_host_facts", lambda: facts)
    probe = types.SimpleNamespace(returncode=0, stdout="CUDA 13.0 2\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *given, **options: probe)
    findings = [*machine._check_torch(), *machine._check_memory()]
    assert findings[0].text == "torch can use all 2 GPUs (CUDA 13.0)"
    assert any("790 TFLOP/s in bfloat16 (measured: docs/results.md" in finding.text for finding in findings)


def test_gpu_info_lists_the_machine(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = call("gpu-info")
    assert result.stdout.startswith("Number of GPUs: 0\n")
    assert result.exit_code == 0 and "no GPU found" in result.stdout and "cores" in result.stdout


def test_help_cuts_no_summary_at_80_columns():
    assert "..." not in call("--help", COLUMNS="80").stdout.partition("Commands:")[2]


def test_help_is_quick_and_light():
    """0.16 s of a core on the machine where it was written; the bound leaves room for a slower one."""
    probe = (
        "import sys, time; sys.argv = ['manyhands', '--help']\n"
        "try:\n from manyhands.cli.main import main; main()\nfinally:\n"
        " heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich.console'}\n"
        " print(sorted(heavy & set(sys.modules)), time.process_time(), file=sys.stderr)"
    )
    with start_process("-c", probe) as child:
        stdout, stderr = child.communicate(timeout=60)
    loaded, seconds = stderr.rsplit(maxsplit=1)
    assert "train" in stdout and loaded == "[]" and float(seconds) < 2


def test_a_real_process_ends_with_the_error_and_its_code(tmp_path):
    with start_process("-m", "manyhands", "plan", str(tmp_path / "none.yaml")) as child:
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == EXIT_USAGE and stderr.startswith("error: the run file does not exist")


def test_ctrl_c_ends_the_process_that_was_started(tmp_path):
    """Both get the signal, as on a terminal; the command waits for its child and ends with 130."""
    (tmp_path / "sleeper.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import os; os.environ['PYTHONPATH'] += ':' + sys.path[0]\n"
        "from subprocess import Popen\n"
        "wait = Popen.wait\n"
        "Popen.wait = lambda self, timeout=None: (print('waiting', flush=True), wait(self, timeout))[1]\n"
        "from manyhands.cli import process, main\n"
        "run = process.run_module\n"
        "process.run_module = lambda module, arguments: run('sleeper', [])\n"
        "sys.argv = ['manyhands', 'chat', sys.path[0]]\n"
        "main.main()\n"
    )
    with start_process("-c", program, start_new_session=True) as child:
        assert {child.stdout.readline(), child.stdout.readline()} == {"up\n", "waiting\n"}
        os.killpg(child.pid, signal.SIGINT)
        _, stderr = child.communicate(timeout=30)
    assert child.returncode == EXIT_INTERRUPTED and stderr.endswith("interrupted\n")


@pytest.mark.parametrize(("name", "exit_code"), [("SIGKILL", EXIT_FAILED), ("SIGTERM", EXIT_TERMINATED)])
def test_a_killed_process_is_named(tmp_path, monkeypatch, name, exit_code):
    (tmp_path / "dies.py").write_text(f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match=name) as raised:
        process.run_module("dies", [])
    assert raised.value.exit_code == exit_code


@pytest.mark.ci
@pytest.mark.real
def test_init_data_and_plan_on_the_real_model(tmp_path, monkeypatch):
    model = os.environ.get("MANYHANDS_SMOLLM2")
    if not model:
        pytest.skip("MANYHANDS_SMOLLM2 names no folder")
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(60)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call("init", "--model", model).exit_code == 0
    shown = call("data", "run.yaml", f"data.cache={tmp_path / 'cache'}", "--rows", 1, "--examples", 5)
    assert shown.exit_code == 0 and "⟦It is" in shown.stdout and "<|im_end|>⟧" in "".join(shown.stdout.split("\n"))
    assert "Step 1 of " in shown.stdout and len(re.findall(r"^── sample .* loss tokens ─", shown.stdout, re.M)) == 1
    planned = call("plan", "run.yaml", f"data.cache={tmp_path / 'cache'}", "--json")
    assert json.loads(planned.stdout)["num_steps"] > 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
