"""The recipes run as they stand, on the CPU with a tiny model: what changes is what a reader is told to change."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from manyhands.facts.model import read_model_facts
from manyhands.importers.load import load_run
from manyhands.planner.search import plan
from manyhands.planner.text import describe_briefly
from tests.e2e.runs import Place, Run, Spec, free_port
from tests.planner.examples import GIB, facts

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
FILES = sorted(RECIPES.glob("*.yaml"))
BASE = ("base-model-template", "continued-pretraining")  # of a base model: no chat template, two special tokens
MIXTURES = ("experts-lora", "experts-full")
# A reader's own model and folders; the CPU; two steps.
SMALL = ("parallel.device=cpu", "stop.max_steps=2", "batch.micro_tokens=auto", "evaluate.max_tokens=8000")
FEW = ("data.max_samples=48", "evaluate.prompts=0", "log.tensorboard=false")


def settings(name: str, place: Path) -> tuple[str, ...]:
    model = place / ("base" if name in BASE else "mixture" if name in MIXTURES else "model")
    at_2048 = ("full-fsdp", "continued-pretraining", *MIXTURES)  # tokens here are bytes
    shorter = dict.fromkeys(at_2048, 2048) | {"long-context": 6000}
    longest = (f"data.max_length={shorter[name]}",) if name in shorter else ()
    return (f"model.name={model}", f"data.cache={place / 'cache'}", *SMALL, *FEW, *longest)


def test_each_file_is_on_the_page() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert sum(line.startswith("## ") for line in page.splitlines()) == 15
    shown = [path.name for path in RECIPES.iterdir() if f'--8<-- "examples/recipes/{path.name}"' in page]
    assert {*shown, "make_data.py"} == {path.name for path in RECIPES.iterdir() if path.is_file()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_are_those_of_the_files(path: Path) -> None:
    """Or the commands on the page would name other folders."""
    assert yaml.safe_load(path.read_text())["name"] == path.stem


# Shapes of the models that the recipes name, by their published config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "experts-lora": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "experts-full": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 50304,
        "tie_word_embeddings": False,
    },
}
PLANNED = {
    "experts-lora": (1, "single", "643 M of 31.2 B (3.35 B active) trained", 0.643e9),
    "experts-full": (4, "fsdp", "all 6.92 B parameters (1.28 B active) trained", 6.92e9),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_planned_for_the_models_that_they_name(name: str, tmp_path: Path) -> None:
    num_gpus, strategy, size, num_trained = PLANNED[name]
    config = {"architectures": ["X"], "dtype": "bfloat16", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config | SHAPES[name]))
    run = load_run(RECIPES / f"{name}.yaml").config
    model = read_model_facts(tmp_path, run.model.name, "random")
    made = plan(run, facts(model, gpus=num_gpus, host_bytes=2048 * GIB, free_disk_bytes=None))
    assert made.layout.strategy == strategy and size in describe_briefly(run, run.method, made)[0]
    assert made.num_trained == pytest.approx(num_trained, rel=0.01)
    chosen = next(one for one in made.candidates if one.chosen)
    assert chosen.memory.total <= chosen.memory.limit


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    from tests.support.tiny import tiny_tokenizer, write_tiny_model

    folder = tmp_path_factory.mktemp("recipes")
    write_tiny_model(folder / "model", max_position_embeddings=32768)
    write_tiny_model(folder / "base")
    write_tiny_model(folder / "mixture", "qwen3_moe", max_position_embeddings=32768)
    tiny_tokenizer(("<|endoftext|>",)).save_pretrained(folder / "base")
    (folder / "base" / "chat_template.jinja").unlink(missing_ok=True)
    command = folder / "bin" / "manyhands"  # written once: a program that is being written cannot be started
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m manyhands "$@"\n')
    command.chmod(0o755)
    subprocess.run([sys.executable, str(RECIPES / "make_data.py"), str(folder / "data")], check=True)
    return Place(folder)


@pytest.fixture(scope="module")
def trained(place: Place) -> Place:
    """All files in one set of processes; QLoRA in one process, as it says."""
    specs = [
        Spec(1 if path.stem == "qlora-one-gpu" else 2, path.stem, settings(path.stem, place.folder), file=str(path))
        for path in FILES
    ]
    place.many(*specs)
    return place


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_files_train_and_save_what_they_say(trained: Place) -> None:
    for path in FILES:
        run = trained.run(path.stem)
        full = yaml.safe_load(path.read_text())["method"]["name"] == "full"
        assert len(run.losses()) == 2 and run.read("status.json")["state"] == "finished", path.stem
        assert (run.folder / ("model" if full else "adapter")).is_dir(), path.stem
    assert (trained.run("new-tokens").folder / "merged").is_dir()
    assert trained.run("experts-full").read("report.json")["measured"]["figures"].keys() == {
        "idle_experts",
        "largest_load",
    }
    plans = {path.stem: trained.run(path.stem).read("plans/001.json")["layout"] for path in FILES}
    assert plans["full-fsdp"]["strategy"] == "fsdp" and plans["qlora-one-gpu"]["strategy"] == "single"
    template = trained.run("base-model-template").folder / "model" / "chat_template.jinja"
    assert "<|im_start|>" in template.read_text()


def with_command(place: Place, **variables: str) -> dict[str, str]:
    """The environment of a reader who has installed the command and has no GPU."""
    path = os.pathsep.join((str(place.folder / "bin"), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **variables}


def bash(place: Place, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of the recipes as a reader calls it."""
    return subprocess.run(
        ["bash", str(RECIPES / script), *arguments],
        cwd=place.folder,
        env=with_command(place, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_evaluation(trained: Place) -> None:
    (trained.folder / "four.jsonl").write_text(
        "".join((trained.folder / "data" / "test.jsonl").read_text().splitlines(keepends=True)[:4])
    )
    done = bash(trained, "evaluation.sh", "runs/chat-lora", "four.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = [json.loads(path.read_text()) for path in trained.folder.glob("runs/chat-lora/eval/*/figures.json")]
    assert figures and "rougeL" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_serving(trained: Place) -> None:
    done = bash(trained, "serving.sh", "runs/chat-lora", str(free_port()))
    assert done.returncode == 0, done.stdout + done.stderr
    [answer] = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resuming_on_other_gpus(place: Place) -> None:
    """Interrupted after its first checkpoint with two processes, finished with one, each step once."""
    recipe = RECIPES / "chat-lora.yaml"
    more = settings("chat-lora", place.folder)
    arguments = [*(one for one in more if not one.startswith("stop.")), "stop.max_steps=16", "stop.epochs=40"]
    done = bash(place, "resume.sh", str(recipe), "name=resumed", *arguments, "batch.samples=4", FOLDER="runs/resumed")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(place.folder / "runs" / "resumed")
    assert "the state is saved" in done.stdout
    assert [row["step"] for row in run.rows()] == list(range(1, 17))
    ranks = [run.read(f"plans/{number:03}.json")["layout"]["mesh"]["replicate"] for number in (1, 2)]
    assert ranks == [2, 1]


def end_all(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[int]:
    """The exit codes. What still lives after ``limit_s`` is ended, it and all that it has started, by SIGABRT: with
    faulthandler each writes where it stands.
    """
    deadline = time.monotonic() + limit_s
    try:
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            if process.poll() is None:
                tree = psutil.Process(process.pid)
                for each in (*tree.children(recursive=True), tree):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(signal.SIGABRT)
        return [process.wait() for process in processes]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_nodes(place: Place) -> None:
    """Two launchers on this machine, each a node of one process. Whatever they wait for ends before the test does."""
    address, logs = f"127.0.0.1:{free_port()}", [place.folder / f"node-{rank}.txt" for rank in range(2)]
    keys = ("name=nodes", "parallel.gpus=2", "parallel.timeout_s=180")
    arguments = [*settings("full-fsdp", place.folder), *keys]
    processes = []
    for rank, log in enumerate(logs):
        command = ["bash", str(RECIPES / "several-nodes.sh"), address, str(RECIPES / "full-fsdp.yaml"), *arguments]
        environment = with_command(place, NODE_RANK=str(rank), PYTHONFAULTHANDLER="1")
        with open(log, "w") as output:
            processes.append(
                subprocess.Popen(
                    command, cwd=place.folder, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
                )
            )
    codes = end_all(processes, limit_s=600)
    run = Run(place.folder / "runs" / "nodes")
    written = (*logs, *sorted(run.folder.glob("logs/*")))
    assert codes == [0, 0], "\n=====\n".join(f"{path.name}\n{path.read_text()}" for path in written)
    assert len(run.losses()) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_plans_of_published_shapes_are_made_elsewhere_too(place: Place) -> None:
    """QLoRA is for a GPU: what a reader without one sees."""
    arguments = [one for one in settings("qlora-one-gpu", place.folder) if "device" not in one]
    command = ["-m", "manyhands", "plan", str(RECIPES / "qlora-one-gpu.yaml"), "--gpus", "RTX-4090", *arguments]
    ended = place.call(*command)
    assert ended.code == 0 and "NF4" in ended.output and "4090" in ended.output, ended.output
