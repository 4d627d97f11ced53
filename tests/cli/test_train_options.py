"""Options of ``train`` by the names that guides use, and TensorBoard beside a run."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request

import pytest

from manyhands.cli import train_options
from manyhands.cli.train_options import tensorboard_beside
from manyhands.core.errors import EXIT_USAGE
from manyhands.launch.run.folder import RunFolder
from tests.cli.conftest import call
from tests.e2e.runs import free_port


def test_a_guides_command_is_read_as_written(run_file, started):
    """--config may stand anywhere, and what follows it are overrides."""
    result = call(
        "train", "--type", "sft", "--config", run_file, "stop.max_steps=3", "--dataset", "a=b.jsonl", "--examples", 9
    )
    assert result.exit_code == 0, result.output
    ((config, _),) = started
    assert (config.task, config.stop.max_steps) == ("sft", 3)
    assert (config.data.train, config.data.max_samples) == ("a=b.jsonl", 9)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("RUN", "--config", "RUN"), "two run files are given"),
        ((), "no run file was given"),
        (("RUN", "--type", "dpo"), "unsupported training type 'dpo'"),
        (("RUN", "--type", "cpt"), "--type cpt contradicts the run file's task: sft"),
        (("RUN", "--dataset", "a", "data.train=b"), "--data and data.train are both given"),
        (("RUN", "--tensorboard", "log.tensorboard=false"), "write nothing for TensorBoard"),
    ],
)
def test_what_contradicts_itself_is_refused(run_file, started, arguments, text):
    result = call("train", *(run_file if word == "RUN" else word for word in arguments))
    assert result.exit_code == EXIT_USAGE and text in result.stderr and not started


def test_the_type_may_be_set_with_the_task(run_file, started):
    assert call("train", run_file, "--type", "cpt", "task=cpt").exit_code == 0


def test_a_used_port_is_named_before_anything_starts(run_file, started):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = call("train", run_file, "--tensorboard", "--port", port)
    assert result.exit_code == EXIT_USAGE and f"port {port} is in use" in result.stderr and not started


def test_tensorboard_answers_on_loopback_until_the_run_ends(tmp_path, capsys):
    folder, port = RunFolder(tmp_path), free_port()
    folder.create()
    with tensorboard_beside(folder, port):
        deadline = time.monotonic() + 120
        while not answers(port):
            assert time.monotonic() < deadline, (folder.logs / "tensorboard.log").read_text()
            time.sleep(0.1)
    assert not answers(port)
    printed = capsys.readouterr()
    assert f"http://127.0.0.1:{port}/" in printed.out and printed.err == ""


def test_a_tensorboard_that_ends_by_itself_is_reported(tmp_path, capsys, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.create()
    monkeypatch.setattr(train_options.sys, "executable", "false")
    with tensorboard_beside(folder, 1):
        time.sleep(0.5)
    assert "ended before the run (exit code 1)" in capsys.readouterr().err


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True
