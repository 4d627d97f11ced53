"""A run on one machine listens on the loopback alone, whoever starts it: torch's store and gloo by themselves would be
open to the network, and what they read there is obeyed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import NO_VERIFY, WAIT_S, WORKER, Place, free_port, train_command
from tests.support.zygote import forking

pytestmark = pytest.mark.timeout(900)
SHORT = ("stop.max_steps=3", "evaluate.at_start=false", "evaluate.every_steps=0")
SCRIPT = "import sys, manyhands as mh; mh.train('run.yaml', {'name': sys.argv[1], 'parallel.gpus': int(sys.argv[2])})"


class Listeners:
    """Addresses at which this process's descendants were seen to listen, as /proc/net/tcp and tcp6 have them."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._ended.wait(0.3):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    for each in process.net_connections("tcp"):
                        if each.status == psutil.CONN_LISTEN:
                            self.addresses.add(each.laddr.ip)

    def __enter__(self) -> Listeners:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def check(self, some: bool = True) -> None:
        assert bool(self.addresses) >= some and all(ip_address(ip).is_loopback for ip in self.addresses), self.addresses


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    with Listeners() as made:
        yield made


@pytest.mark.ci
@pytest.mark.parametrize(
    ("num_ranks", "master_port"),
    [(1, False), (2, True), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, True), (2, False)))],
)
def test_manyhands_train(num_ranks: int, master_port: bool, place: Place, listeners: Listeners) -> None:
    """With the verification of what is exported, in a process of its own."""
    variables = {"MASTER_PORT": str(free_port())} if master_port else {}
    name = f"loopback-{num_ranks}-{master_port}"
    ended = place.call(*train_command(name, "--gpus", str(num_ranks), *SHORT), environment=variables)
    assert ended.code == 0, ended.output
    listeners.check()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_python_api(num_ranks: int, place: Place, listeners: Listeners) -> None:
    ended = place.call("-c", SCRIPT, f"loopback-python-{num_ranks}", str(num_ranks), plant=NO_VERIFY)
    assert ended.code == 0, ended.output
    listeners.check()


@pytest.mark.slow
def test_ranks_of_srun_on_one_node(place: Place, listeners: Listeners) -> None:
    ends = place.by_srun("name=loopback-srun", *SHORT, plant=NO_VERIFY)
    assert [end.code for end in ends] == [0, 0], ends
    listeners.check()


@pytest.mark.slow
@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "vm.example"])
def test_ranks_started_by_hand(master: str, place: Place, listeners: Listeners) -> None:
    """Of one machine, by whatever name MASTER_ADDR calls it."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(2):
            variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = place.output.with_suffix(f".hand-{rank}.txt")
            begun = place.start(
                *WORKER,
                f"name=loopback-hand-{master}",
                *SHORT,
                plant=NO_VERIFY,
                environment=variables,
                output=output,
            )
            processes.append(stack.enter_context(begun))
        codes = [process.wait(WAIT_S) for process in processes]
    assert codes == [0, 0], place.output.with_suffix(".hand-0.txt").read_text()
    listeners.check()


@pytest.mark.slow
def test_two_launchers_on_one_machine(place: Place, listeners: Listeners) -> None:
    """A rendezvous on the loopback is one machine: the launchers' channel, torch's store and gloo listen there."""
    rendezvous = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        processes = []
        for node in range(2):
            nodes = ("--nodes", "2", "--node-rank", str(node), "--rendezvous", rendezvous)
            output = place.output.with_suffix(f".node-{node}.txt")
            command = train_command("loopback-nodes", *nodes, *SHORT, "parallel.timeout_s=120")
            processes.append(stack.enter_context(place.start(*command, plant=NO_VERIFY, output=output)))
        codes = [process.wait(WAIT_S) for process in processes]
    assert codes == [0, 0], place.output.with_suffix(".node-0.txt").read_text()
    listeners.check()


@pytest.mark.slow
def test_prove(place: Place, listeners: Listeners) -> None:
    layouts = ("--layouts", "single:1,ddp:2", "--steps", "2", "method.dropout=0")
    ended = place.call("-m", "manyhands", "prove", "run.yaml", *layouts, limit_s=2 * WAIT_S)
    assert ended.code == 0, ended.output
    listeners.check()


@pytest.mark.slow
def test_eval_and_generate_in_several_processes(whole: object, place: Place, listeners: Listeners) -> None:
    (place.folder / "prompts.jsonl").write_text('{"prompt": "alpha"}\n{"prompt": "beta"}\n')
    for command in (
        ["eval", "runs/whole", "--output", "figures", "--processes", "2"],
        ["generate", "runs/whole", "--input", "prompts.jsonl", "--output", "answers.jsonl", "--processes", "2"],
    ):
        ended = place.call("-m", "manyhands", *command)
        assert ended.code == 0, ended.output
    listeners.check(some=False)


@pytest.mark.ci
def test_the_processes_of_a_benchmark(tmp_path: Path, listeners: Listeners) -> None:
    """``manyhands.launch.local.agent`` starts them, as torchrun would."""
    (tmp_path / "ranks.py").write_text(
        "import sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "found = [None] * 2\n"
        "dist.all_gather_object(found, dist.get_rank())\n"
        "dist.destroy_process_group()\n"  # else its threads may abort a process that ends meanwhile
        "sys.exit(found != [0, 1] or sys.argv[1:2] != ['x'])\n"
    )
    command = [sys.executable, "-m", "manyhands.launch.local.agent", "2", "ranks", "x"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    with forking():
        subprocess.run(command, env=variables, check=True, timeout=WAIT_S)
        assert subprocess.run([*command[:-1], "y"], env=variables, timeout=WAIT_S).returncode == 1
    listeners.check()
