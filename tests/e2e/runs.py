"""Starting real runs of a tiny model as a user would, pausing and ending them where a test wants, and reading what they
leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from manyhands.cli.main import app
from tests.support.zygote import forking

HERE = Path(__file__).parent
NUM_STEPS = 12
WAIT_S = 240.0  # busy machines are slow; what is claimed of time is asserted where it is
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]

# One step takes milliseconds: what must happen at a certain step is planted into the worker, not timed from outside.
NO_VERIFY = {
    "manyhands.worker.export_stages": "def verify(rank, *_):\n"
    "    rank.process.print('verification left out by the test')\n"
    "    return {}\n"
}


def at_step(step: int, act: str, rank: int | None = None) -> dict[str, str]:
    """Runs ``act`` (indented by nothing, may use ``self.rank``) when a step is done and before its row is written."""
    who = "True" if rank is None else f"self.rank.world.rank == {rank}"
    body = "\n".join(f"        {line}" for line in act.splitlines())
    return {
        "manyhands.worker.training": "import os, pathlib, signal, time\n"
        "_after_step = ProgressHook.after_step\n"
        "def _planted(self, state, result):\n"
        "    self.rank.process.beat(state.step)\n"
        f"    if state.step == {step} and {who}:\n{body}\n"
        "    _after_step(self, state, result)\n"
        "ProgressHook.after_step = _planted\n"
    }


def at_any_step(act: str) -> dict[str, str]:
    """The same at each, where ``act`` looks at ``state.step``."""
    body = at_step(0, act)["manyhands.worker.training"]
    return {"manyhands.worker.training": body.replace("if state.step == 0 and True:", "if True:")}


def kill_once(mark: Path, saved: int | None = None) -> str:
    """An ``act``: SIGKILL, the first time only; with ``saved`` once the checkpoint of that step is there, which another
    process writes: on a loaded machine for longer than the steps take that follow.
    """
    folder = f'self.rank.folder.checkpoints / "step-{saved or 0:06}"'
    wait = f"while not ({folder}).exists() and time.monotonic() < deadline: time.sleep(0.01)" if saved else "pass"
    return (
        f"mark, deadline = pathlib.Path({str(mark)!r}), time.monotonic() + {WAIT_S}\n"
        f"if not mark.exists():\n    mark.touch()\n    {wait}\n    os.kill(os.getpid(), signal.SIGKILL)"
    )


def pause(mark: Path) -> str:
    """An ``act``: writes a mark for each rank and waits, until it is killed or asked to stop."""
    return (
        f"pathlib.Path('{mark}-' + str(self.rank.world.rank)).touch()\n"
        f"deadline = time.monotonic() + {WAIT_S}\n"
        "while not self.rank.process.stop() and time.monotonic() < deadline: time.sleep(0.02)"
    )


def in_evaluation(step: int, mark: Path) -> dict[str, str]:
    """Pauses in the evaluation after a step, before its first batch, as ``pause`` does."""
    return {
        "manyhands.worker.training": "import pathlib, time\n"
        "_stop_if_asked = stop_if_asked\n"
        "def stop_if_asked(rank, engine):\n"
        f"    if rank.process.step == {step}:\n"
        f"        pathlib.Path('{mark}-' + str(rank.world.rank)).touch()\n"
        f"        deadline = time.monotonic() + {WAIT_S}\n"
        "        while not rank.process.stop() and time.monotonic() < deadline: time.sleep(0.02)\n"
        "    _stop_if_asked(rank, engine)\n"
    }


SITECUSTOMIZE = """
import importlib.abc, importlib.machinery, sys
PLANTS = {plants!r}
class Planter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PLANTS:
            return None
        code, spec = PLANTS.pop(name), importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            exec(code, module.__dict__)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Planter())
"""


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    seconds: float


@dataclass(frozen=True)
class Spec:
    """One run for ``Place.many``; ``break_at`` as in ``many_runs``."""

    ranks: int
    name: str
    arguments: tuple[str, ...] = ()
    break_at: Mapping[str, int] | None = None
    file: str = "run.yaml"


@dataclass
class Place:
    """A folder with a model, rows and a run file, where runs are started."""

    folder: Path

    def run(self, name: str) -> Run:
        return Run(self.folder / "runs" / name)

    @property
    def output(self) -> Path:
        """Of the newest process; other processes of pytest-xdist use the folder too."""
        return self.folder / f"output-{os.getpid()}.txt"

    def variables(self, plant: Mapping[str, str] | None, environment: Mapping[str, str] | None) -> dict[str, str]:
        """The environment of a process with ``plant``: code by the name of the module that it is added to."""
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        if plant:
            site = Path(tempfile.mkdtemp(prefix="site-", dir=self.folder))
            (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(plants=dict(plant)))
            variables["PYTHONPATH"] = os.pathsep.join((str(site), variables["PYTHONPATH"]))
        return variables

    @contextlib.contextmanager
    def start(
        self,
        *command: str,
        plant: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
        may_fork: bool = True,
    ) -> Iterator[subprocess.Popen[str]]:
        """A process that leads a session of its own, output in one file; whatever still lives at the end is killed."""
        forks = forking() if may_fork else contextlib.nullcontext()
        with open(output or self.output, "w+") as output_file, forks:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=self.variables(plant, environment),
                stdout=output_file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                kill_all(process.pid)
                process.wait()

    def wait(self, process: subprocess.Popen[str], begin: float, limit_s: float = WAIT_S) -> Ended:
        code = process.wait(limit_s)
        return Ended(code, self.output.read_text(), time.monotonic() - begin)

    def call(self, *command: str, limit_s: float = WAIT_S, **options: Any) -> Ended:
        begin = time.monotonic()
        with self.start(*command, **options) as process:
            return self.wait(process, begin, limit_s)

    def by_srun(self, *arguments: str, num_tasks: int = 2, **options: Any) -> list[Ended]:
        """Ranks as srun starts them: no agent beside them, and rank 0 serves the store."""
        port, begin = free_port(), time.monotonic()
        with contextlib.ExitStack() as stack:
            processes = []
            for rank in range(num_tasks):
                environment = {
                    "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(rank),
                    "SLURM_NTASKS": str(num_tasks),
                    "SLURM_STEP_ID": "0",  # a batch script has none
                    "SLURM_STEP_NUM_TASKS": str(num_tasks),
                    "SLURM_STEP_NUM_NODES": "1",
                    "SLURM_JOB_NODELIST": "localhost",
                }
                environment |= {"SLURM_TASKS_PER_NODE": str(num_tasks), "MASTER_ADDR": "127.0.0.1"}
                environment["MASTER_PORT"] = str(port)
                output = self.output.with_suffix(f".{rank}.txt")
                start = self.start(*WORKER, *arguments, environment=environment, output=output, **options)
                processes.append(stack.enter_context(start))
            codes = [process.wait(WAIT_S) for process in processes]
        texts = [self.output.with_suffix(f".{rank}.txt").read_text() for rank in range(num_tasks)]
        return [Ended(code, text, time.monotonic() - begin) for code, text in zip(codes, texts, strict=True)]

    def train(
        self, name: str, *arguments: str, file: str = "run.yaml", plant: Mapping[str, str] | None = None
    ) -> Ended:
        """``manyhands train run.yaml name=NAME ...`` with this process as the launcher; ranks are processes."""
        command, begin = train_command(name, *arguments, file=file)[2:], time.monotonic()
        with self._inside(self.variables(plant, None)), forking(), pytest.raises(SystemExit) as ended:
            app(command, prog_name="manyhands")
        return Ended(int(ended.value.code or 0), self.output.read_text(), time.monotonic() - begin)

    @contextlib.contextmanager
    def _inside(self, variables: Mapping[str, str]) -> Iterator[None]:
        """This process as if it had been started in the folder, with these variables and its output in the file."""
        kept_variables, kept_folder, kept_output = dict(os.environ), Path.cwd(), (os.dup(1), os.dup(2))
        with open(self.output, "w") as output:
            os.environ.update(variables)
            os.chdir(self.folder)
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    yield
            finally:
                for number, kept in enumerate(kept_output, start=1):
                    os.dup2(kept, number)
                    os.close(kept)
                os.chdir(kept_folder)
                os.environ.clear()
                os.environ.update(kept_variables)

    def wait_for(self, marks: list[Path], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not all(mark.exists() for mark in marks):
            assert process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)

    def many(self, *specs: Spec) -> str:
        """Many runs of the worker in one set of two processes (see ``many_runs``); each must end as its spec says.
        Returns their output.
        """
        path = self.folder / f"many-{specs[0].name}.json"
        fields = [
            {
                "arguments": [spec.file, f"name={spec.name}", *spec.arguments],
                "ranks": spec.ranks,
                "break_at": spec.break_at,
            }
            for spec in specs
        ]
        path.write_text(json.dumps(fields))
        ended = self.call(
            "-m", "torch.distributed.run", "--nproc_per_node=2", str(HERE / "many_runs.py"), str(path), limit_s=900
        )
        assert ended.code == 0, ended.output
        codes = json.loads(path.with_suffix(".codes").read_text())
        wrong = [(spec, code) for spec, code in zip(specs, codes, strict=True) if code != (1 if spec.break_at else 0)]
        assert not wrong, ended.output
        return ended.output


WORKER = ("-m", "manyhands.worker", "run.yaml")


_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody is given by chance as long as this process lives, as a socket stays bound to it. As that one
    does not listen, a program that asks for this very port (with SO_REUSEADDR, as servers do) gets it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _RESERVED.append(held)
    return held.getsockname()[1]


def train_command(name: str, *arguments: str, file: str = "run.yaml") -> list[str]:
    return ["-m", "manyhands", "train", file, f"name={name}", *arguments]


@dataclass(frozen=True)
class Run:
    """What a run has left."""

    folder: Path

    def rows(self, kind: str = "step") -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def course(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of every step, every bit of them."""
        return [(row["step"], row["loss"], row["grad_norm"]) for row in self.rows()]

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows()]

    def seen(self) -> list[tuple[int, ...]]:
        return [(row["num_samples"], row["num_tokens"], row["num_loss_tokens"]) for row in self.rows()]

    def evaluations(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.rows("evaluation")]

    def steps_saved(self) -> list[int]:
        return sorted(
            int(path.parent.name.removeprefix("step-")) for path in self.folder.glob("checkpoints/*/manifest.json")
        )

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


def kill_all(pid: int) -> None:
    """SIGKILL to a process and to all that it has started, the launcher first: nobody can tidy up."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family[1:], timeout=10)


def write_place(folder: Path) -> Place:
    """80 ragged rows, of which 20 are held out; run.yaml: LoRA with dropout, 12 steps, 8 to an epoch, saved every 4;
    full.yaml.
    """
    from tests.support.tiny import write_tiny_model

    write_tiny_model(folder / "model")
    draw = random.Random(0)
    rows = [
        {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 6))),
            "completion": " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
        }
        for _ in range(80)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "model": {"name": str(folder / "model")},
        "method": {"name": "lora", "rank": 4, "alpha": 8, "dropout": 0.1},
        "data": {"train": "rows.jsonl", "validation_fraction": 0.25, "max_length": 256, "cache": str(folder / "cache")},
        "batch": {"samples": 8, "micro_tokens": 512},
        "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 1.5},
        "stop": {"epochs": 10, "max_steps": NUM_STEPS},
        "parallel": {"device": "cpu"},
        "launch": {"restarts": 0},  # a planted fault ends the run; tests of restarts set their own number
        "evaluate": {"every_steps": 4, "prompts": 1, "max_new_tokens": 4},
        "checkpoint": {"every_steps": 4},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    full = {"method": {"name": "full"}, "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 1.5}}
    (folder / "full.yaml").write_text(yaml.safe_dump(run | full))
    return Place(folder)
