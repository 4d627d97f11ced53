"""The queue: what waits starts one after the other, in a process of its own; a run is stopped through its launcher."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from manyhands.core.errors import UserError
from manyhands.launch.run.folder import RunFolder
from manyhands.ui import queue as queue_module
from manyhands.ui.commands import words_of
from manyhands.ui.queue import Queue, describe, find_launcher, is_at_work, run_queue, stop, words_to_resume
from tests.ui.conftest import write_run

HOLD = """
import sys, time
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.lock import FolderLock
FolderLock(RunFolder(sys.argv[1])); print("held", flush=True); time.sleep(60)
"""


@pytest.fixture
def queue(runs, monkeypatch):
    monkeypatch.setattr(Queue, "start_runner", lambda self: None)
    monkeypatch.setattr(queue_module, "command_of", lambda words: [sys.executable, "-c", *words])
    return Queue(runs)


@pytest.fixture
def held(runs):
    run = write_run(runs, "one", state="running")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdout.readline() == b"held\n"
    yield RunFolder(run), holder
    holder.kill()
    holder.wait()


def test_items_start_in_order_when_the_machine_is_free(queue, runs):
    looks = iter([False, True, True])
    queue.add([f"open(r'{runs}/order', 'a').write('1'); print('said')"], "first")
    queue.add([f"open(r'{runs}/order', 'a').write('2'); raise SystemExit(143)"], "second")
    run_queue(queue, lambda *_: next(looks), look_s=0)
    assert (runs / "order").read_text() == "12"
    shown = describe(queue, lambda file: file.read_text().splitlines())["items"]
    assert [(one["title"], one["state"], one["log"]) for one in shown] == [
        ("first", "finished", ["said"]),
        ("second", "interrupted", []),
    ]


def test_paused_removed_twice(queue):
    first = queue.add(["pass"], "first")
    with pytest.raises(UserError, match="in the queue already"):
        queue.add(["pass"], "first")
    queue.pause(True)
    run_queue(queue, lambda *_: True)
    assert "started" not in queue.read()["items"][0]
    queue.remove(first)
    assert queue.read() == {"paused": True, "gpus": [], "items": []}


def test_what_is_added_meanwhile_is_kept(queue):
    queue.add(["import time; time.sleep(0.5)"], "first")
    runner = threading.Thread(target=run_queue, args=(queue, lambda *_: True, 0))
    runner.start()
    queue.add(["pass"], "second")
    runner.join()
    assert [one["code"] for one in queue.read()["items"]] == [0, 0]


def test_one_run_on_each_gpu(queue, runs):
    show = f"import os, time; open(r'{runs}/gpus', 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + ' '); time.sleep(1)"
    for number in range(3):
        queue.add([f"{show} #{number}"], str(number))
    with queue.change() as state:
        state["gpus"] = ["GPU-a", "GPU-b"]
    begun = time.time()
    assert run_queue(queue, lambda folder, gpu: True, look_s=0.05)
    items = queue.read()["items"]
    assert sorted((runs / "gpus").read_text().split()[:2]) == ["GPU-a", "GPU-b"]
    assert items[1]["started"] < items[0]["ended"] <= items[2]["started"]
    assert {one["code"] for one in items} == {0} and items[0]["started"] >= begun


def test_what_was_left_at_work_is_waited_for_and_what_has_died_is_not_open(queue):
    left = subprocess.Popen(["sleep", "1"])
    queue.add(["pass"], "left")
    with queue.change() as state:
        state["items"][0] |= {"started": time.time(), "pid": left.pid}
    with pytest.raises(UserError, match="in the queue already"):
        queue.add(["pass"], "left")
    threading.Thread(target=left.wait).start()
    assert run_queue(queue, lambda *_: True, look_s=0.05)
    assert queue.read()["items"][0]["code"] is None and left.returncode == 0
    queue.add(["pass"], "again")


def test_a_second_process_runs_nothing(queue, monkeypatch):
    queue.add(["import time; time.sleep(1)"], "first")
    runner = threading.Thread(target=run_queue, args=(queue, lambda *_: True, 0.05))
    runner.start()
    time.sleep(0.5)
    assert run_queue(queue, lambda *_: True) is False
    runner.join()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"items": 1}', '{"items": [1]}', '{"items": [{"id": 1}, {"words": [], "title": "x"}]}', "\x00"]
)
def test_a_damaged_file_is_an_empty_queue(queue, text):
    queue.file.write_text(text)
    assert queue.read()["items"] == []


def test_queue_outlives_whoever_has_filled_it(runs):
    """The real runner: a process of its own that ends when nothing waits."""
    add = f"Queue(Path(r'{runs}')).add(['--version'], 'x')"
    fill = f"from pathlib import Path; from manyhands.ui.queue import Queue; {add}"
    subprocess.run([sys.executable, "-c", fill], check=True)
    deadline = time.monotonic() + 60
    while "code" not in (item := json.loads((runs / "queue.json").read_text())["items"][0]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert item["code"] == 0
    assert "manyhands" in (runs / ".queue" / "1.log").read_text()


def test_stop_reaches_the_launcher(held):
    folder, holder = held
    assert is_at_work(folder)
    stop(folder)
    assert holder.wait(10) == -signal.SIGTERM
    with pytest.raises(UserError, match="no launcher of this run"):
        stop(folder)


def test_a_process_that_got_the_number_is_not_the_launcher(held):
    folder, _ = held
    folder.lock_file.write_text(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))
    assert find_launcher(folder) is None


def test_resume_names_the_run_where_it_is(runs):
    run = write_run(runs, "one", state="interrupted")
    assert words_to_resume(RunFolder(run)) == ["train", f"{run}/run.json", f"output.dir={runs}"]
    moved = run.rename(runs / "other")
    with pytest.raises(UserError, match="another name"):
        words_to_resume(RunFolder(moved))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            {"model": "a/b", "data": "x.jsonl", "learning_rate": 1e-4, "epochs": ""},
            ["--model=a/b", "--data=x.jsonl", "--lr=0.0001"],
        ),
        ({"run": "run.yaml", "keys": "a.b=1\n\n c=x y "}, ["run.yaml", "a.b=1", "c=x y"]),
        ({"model": "--output=/etc"}, ["--model=--output=/etc"]),
        ({"run": "--help"}, None),
        ({"run": "a.b=1"}, None),
        ({"keys": "--fresh"}, None),
        ({"output": "x"}, None),
    ],
)
def test_words_of_forms(form, words):
    if words is None:
        with pytest.raises(UserError):
            words_of(form)
    else:
        assert words_of(form) == words
