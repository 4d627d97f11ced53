"""Runs on several nodes: network namespaces with own addresses, names, processes and disks (tests/support/nodes.py).

Whatever goes wrong ends everything in bounded time, with the cause on every terminal.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from manyhands.planner.types import Plan
from tests.e2e.runs import NO_VERIFY, WAIT_S, Ended, Place, Run, at_any_step, at_step, kill_once, pause
from tests.support.nodes import Bed, Launched, make_bed, why_no_nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
]

TIMEOUT_S = 15
PORT = 29400
LONG = ("stop.max_steps=400", "stop.epochs=100", "evaluate.every_steps=0", f"parallel.timeout_s={TIMEOUT_S}")


@pytest.fixture
def bed(place: Place, request: pytest.FixtureRequest):
    with make_bed(place.folder, getattr(request, "param", 2)) as made:
        yield made


def start(
    place: Place,
    bed: Bed,
    name: str,
    *arguments: str,
    rank: int,
    node: int | None = None,
    num_nodes: int | None = None,
    plant: Mapping[str, str] | None = None,
    own: Sequence[Path] = (),
    launcher: str = "manyhands",
) -> Launched:
    """This node's command of a run; ``rank`` is what it says, ``node`` where it is (the same, if not given)."""
    host, num_nodes = bed.address(0), num_nodes or bed.num
    ours = ["--nodes", str(num_nodes), "--node-rank", str(rank), "--rendezvous", f"{host}:{PORT}"]
    at = f"--nnodes={num_nodes} --node-rank={rank} --master-addr={host} --master-port={PORT} --nproc_per_node=1"
    there = f"--multi_gpu --num_machines={num_nodes} --num_processes={num_nodes} --machine_rank={rank}"
    there += f" --main_process_ip={host} --main_process_port={PORT} --mixed_precision=no --dynamo_backend=no"
    worker = ["-m", "manyhands.worker", "run.yaml", f"name={name}"]
    command = {
        "manyhands": ["-m", "manyhands", "train", "run.yaml", f"name={name}", *ours],
        "torchrun": ["-m", "torch.distributed.run", *at.split(), *worker],
        "accelerate": ["-m", "accelerate.commands.launch", *there.split(), *worker],
    }[launcher]
    variables = place.variables(NO_VERIFY if plant is None else plant, None)
    where = rank if node is None else node
    return bed.start(where, sys.executable, *command, *arguments, environment=variables, own=own)


def train(place: Place, bed: Bed, name: str, *arguments: str, **options) -> list[Ended]:
    begin = time.monotonic()
    nodes = [start(place, bed, name, *arguments, rank=rank, **options) for rank in range(bed.num)]
    return [Ended(node.wait(), node.text, time.monotonic() - begin) for node in nodes]


def test_a_killed_rank_is_started_again_on_all_nodes(place: Place, whole: tuple[Ended, Run], bed: Bed) -> None:
    mark = place.folder / "nodes-again"
    plant = NO_VERIFY | at_step(7, kill_once(mark, saved=4), rank=1)
    ends = train(place, bed, mark.name, "launch.restarts=3", plant=plant)
    assert [end.code for end in ends] == [0, 0], texts(ends)
    for end in ends:
        assert end.output.count("was killed (SIGKILL)") == 1 and "restarting from step 4" in end.output, texts(ends)
    assert place.run(mark.name).course() == whole[1].course()


@pytest.mark.parametrize("bed", [3], indirect=True)
def test_where_it_is_allowed_the_others_go_on_without_machines_that_are_lost(place: Place, bed: Bed) -> None:
    """Of three nodes one dies and then one is cut off, which must not go on by itself; all samples are as on one."""
    name, keys = "fewer-nodes", (f"parallel.timeout_s={TIMEOUT_S}", "method.dropout=0")
    keys += ("launch.restarts=3", "launch.min_gpus=1")
    marks = [place.folder / f"{name}-{world_size}" for world_size in (3, 2)]
    act = f"if (state.step, self.rank.world.world_size) in ((6, 3), (9, 2)):\n{pause(place.folder / name)}"
    act = act.replace("self.rank.world.rank", "self.rank.world.world_size").replace("\n", "\n    ")
    is_out = place.folder / f"{name}-out"  # else the last node might have finished before the other looks for it
    act += f"\nif (state.step, self.rank.world.world_size) == (10, 1):\n    deadline = time.monotonic() + {WAIT_S}\n"
    act += f"    while not pathlib.Path({str(is_out)!r}).exists() and time.monotonic() < deadline: time.sleep(0.02)"
    plant = NO_VERIFY | at_any_step(act)
    nodes = [start(place, bed, name, *keys, rank=rank, plant=plant) for rank in range(3)]
    wait_for(marks[0], nodes)
    command = nodes[1].command
    nodes[1].process.kill()
    command.kill()
    wait_for(marks[1], nodes)
    bed.cut(2)
    assert nodes[2].wait() == 1, f"{nodes[0].text}\n=====\n{nodes[2].text}"
    is_out.touch()
    assert nodes[0].wait() == 0, nodes[0].text
    run = place.run(name)
    for lost, left in (("node 1 (mh1)", "2 of 3"), ("node 1 (mh2)", "1 of 2")):
        assert f"{lost} is lost; the run continues with {left} nodes; restarting from step" in nodes[0].text
    assert [planned_ranks(run, number) for number in (1, 2, 3)] == [3, 2, 1]
    alone = place.train("nodes-left-alone", "method.dropout=0", plant=NO_VERIFY)
    assert alone.code == 0, alone.output
    assert run.losses() == pytest.approx(place.run("nodes-left-alone").losses(), rel=1e-5)


@pytest.mark.parametrize("bed", [3], indirect=True)
@pytest.mark.parametrize("fate", ["dies", "is cut off"])
def test_without_node_0_the_others_go_on_at_the_next(place: Place, bed: Bed, fate: str) -> None:
    """Node 0 dies, and then the node in its place: the last one ends the run alone. Or it is cut off: with one GPU of
    the two that are asked for it ends, and the others go on. All samples are as on one.
    """
    dies = fate == "dies"
    name, keys = f"without-0-{dies}", (f"parallel.timeout_s={TIMEOUT_S}", "method.dropout=0", "launch.restarts=3")
    keys += (f"launch.min_gpus={1 if dies else 2}",)
    marks = [place.folder / f"{name}-{world_size}" for world_size in (3, 2)]
    at = ((6, 3), (9, 2)) if dies else ((6, 3),)
    act = f"if (state.step, self.rank.world.world_size) in {at}:\n{pause(place.folder / name)}"
    act = act.replace("self.rank.world.rank", "self.rank.world.world_size").replace("\n", "\n    ")
    nodes = [start(place, bed, name, *keys, rank=rank, plant=NO_VERIFY | at_any_step(act)) for rank in range(3)]
    for number, mark in enumerate(marks if dies else marks[:1]):
        wait_for(mark, nodes[number:])
        if dies:
            command = nodes[number].command
            nodes[number].process.kill()
            command.kill()
        else:
            bed.cut(0)
    left = nodes[2:] if dies else nodes[1:]
    assert [node.wait() for node in left] == [0] * len(left), "\n=====\n".join(node.text for node in nodes)
    assert dies or nodes[0].wait() == 1, nodes[0].text
    run = place.run(name)
    assert "node 0 (mh0) is lost; the run continues with 2 of 3 nodes; restarting from step" in nodes[2].text
    assert [planned_ranks(run, number) for number in ((1, 2, 3) if dies else (1, 2))] == ([3, 2, 1] if dies else [3, 2])
    assert len((run.folder / "restarts.jsonl").read_text().splitlines()) == (2 if dies else 1)
    alone = place.train(f"{name}-alone", "method.dropout=0", plant=NO_VERIFY)
    assert alone.code == 0, alone.output
    assert run.losses() == pytest.approx(place.run(f"{name}-alone").losses(), rel=1e-5)


def planned_ranks(run: Run, number: int) -> int:
    return Plan.model_validate(run.read(f"plans/{number:03}.json")).layout.world_size


def wait_for(mark: Path, nodes: list[Launched]) -> None:
    deadline = time.monotonic() + 240
    while not mark.exists():
        assert time.monotonic() < deadline and nodes[0].process.poll() is None, nodes[0].text
        time.sleep(0.05)


def texts(ends: list[Ended]) -> str:
    return "\n=====\n".join(end.output for end in ends)


def test_two_nodes_give_the_losses_of_one_and_a_second_start_is_finished(
    place: Place, whole: tuple[Ended, Run], bed: Bed
) -> None:
    """Each with a token cache on its own disk."""
    ends = train(place, bed, "two-nodes", own=[place.folder / "cache"])
    assert [end.code for end in ends] == [0, 0], texts(ends)
    assert place.run("two-nodes").course() == whole[1].course()
    assert all("tokenized 80 samples" in end.output for end in ends), texts(ends)
    assert "nodes" in ends[0].output and "mh0 (1), mh1 (1)" in " ".join(ends[0].output.split())
    again = train(place, bed, "two-nodes")
    assert [end.code for end in again] == [0, 0], texts(again)
    assert all("is finished; nothing to do" in end.output for end in again)


@pytest.mark.parametrize("bed", [3], indirect=True)
def test_a_run_of_two_nodes_with_two_ranks_each_resumes_on_three_with_one(place: Place, bed: Bed) -> None:
    three = ("method.dropout=0",)  # dropout is keyed by rank: another number of ranks draws others
    two = (*three, "parallel.gpus=4")
    stop = NO_VERIFY | at_step(6, "os.kill(os.getpid(), signal.SIGTERM)", rank=3)
    nodes = [start(place, bed, "four-to-three", *two, rank=rank, num_nodes=2, plant=stop) for rank in range(2)]
    codes = [node.wait() for node in nodes]
    run = place.run("four-to-three")
    assert run.read("status.json")["state"] in ("interrupted", "failed") and 0 not in codes, nodes[0].text
    step = max(run.steps_saved())
    ends = train(place, bed, "four-to-three", *three)
    assert [end.code for end in ends] == [0, 0, 0], texts(ends)
    assert f"at step {step}" in ends[0].output and run.read("plans/002.json")["cause"] == "resize"
    alone = place.train("alone-without-dropout", *three, plant=NO_VERIFY)
    assert alone.code == 0, alone.output
    assert run.losses() == pytest.approx(place.run("alone-without-dropout").losses(), rel=1e-5)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_same_under_another_launcher(place: Place, whole: tuple[Ended, Run], bed: Bed, launcher: str) -> None:
    ends = train(place, bed, f"nodes-{launcher}", launcher=launcher, own=[place.folder / "cache"])
    assert [end.code for end in ends] == [0, 0], texts(ends)
    assert place.run(f"nodes-{launcher}").course() == whole[1].course()
    again = train(place, bed, f"nodes-{launcher}", launcher=launcher)
    assert [end.code for end in again] == [0, 0], texts(again)
    assert all("is finished; nothing to do" in end.output for end in again), texts(again)


@pytest.mark.parametrize("launcher", ["manyhands", "torchrun"])
@pytest.mark.parametrize(
    ("disk", "words"),
    [
        ("runs", "output.dir is not shared: mh1 does not see what mh0 writes there"),
        ("model", "the model folder has no weights"),
    ],
)
def test_what_is_not_there_is_refused_on_every_terminal(
    place: Place, bed: Bed, launcher: str, disk: str, words: str
) -> None:
    (place.folder / "runs").mkdir(exist_ok=True)
    name = f"own-{disk}-{launcher}"
    nodes = [
        start(place, bed, name, rank=rank, launcher=launcher, own=[place.folder / disk] if rank else [])
        for rank in range(2)
    ]
    ends = [Ended(node.wait(), node.text, 0) for node in nodes]
    assert all(end.code != 0 and f"error: {words}" in end.output for end in ends), texts(ends)
    assert launcher != "manyhands" or [end.code for end in ends] == [2, 2]
    assert "mh1" in ends[0].output and not place.run(name).folder.exists()


def test_a_node_that_does_not_come_comes_twice_or_with_another_run(place: Place, bed: Bed) -> None:
    limit = "parallel.timeout_s=6"
    alone = start(place, bed, "one-came", limit, rank=0)
    assert alone.wait() == 1 and "error: 1 of 2 nodes did not come: node 1" in alone.text, alone.text
    twice = [start(place, bed, "came-twice", rank=rank, node=node) for rank, node in ((0, 0), (0, 1))]
    for launched in twice:
        assert launched.wait() == 2 and "error: node 0 came twice: from mh0 and from mh1" in launched.text
    other = [start(place, bed, "another-run", f"seed={seed}", rank=rank) for rank, seed in ((0, 0), (1, 7))]
    for launched in other:
        assert launched.wait() == 2 and "came with another run than node 0 (mh0)" in launched.text, launched.text
        assert "seed: 0 -> 7" in launched.text
    assert not place.run("came-twice").folder.exists() and not place.run("another-run").folder.exists()


@pytest.fixture
def going(place: Place, bed: Bed, request: pytest.FixtureRequest):
    """A run whose ranks have all made a few steps, and go on slowly."""
    launcher, name = getattr(request, "param", "manyhands"), f"going-{bed.key}"
    act = f"pathlib.Path('{place.folder}/mark-{name}-' + str(self.rank.world.rank)).touch(); time.sleep(0.3)"
    plant = at_step(1, act)
    module = "manyhands.worker.training"
    plant = NO_VERIFY | {module: plant[module].replace("state.step == 1", "state.step")}
    nodes = [start(place, bed, name, *LONG, rank=rank, plant=plant, launcher=launcher) for rank in range(2)]
    marks = [place.folder / f"mark-{name}-{rank}" for rank in range(2)]
    deadline = time.monotonic() + 200
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline and nodes[0].process.poll() is None, nodes[0].text
        time.sleep(0.05)
    return nodes, place.run(name)


def end(nodes: list[Launched], *, within_s: float = TIMEOUT_S + 30) -> list[int]:
    """Exit codes of launchers that end in time; no rank is left."""
    codes = [node.wait(within_s + 30) for node in nodes]  # with what a busy machine takes
    return codes


def test_a_rank_that_is_killed_is_named_on_both_terminals(going) -> None:
    nodes, _ = going
    nodes[1].workers()[0].kill()
    assert end(nodes) == [1, 1]
    for node in nodes:
        assert "error: rank 1 was killed (SIGKILL)" in node.text and "where: mh1, " in node.text, node.text


def test_a_rank_that_is_stopped_is_named_on_both_terminals(going) -> None:
    nodes, _ = going
    nodes[1].workers()[0].suspend()
    assert end(nodes) == [1, 1]
    for node in nodes:
        found = re.search(r"error: rank 1 on mh1 made no progress for (\d+) s \(parallel.timeout_s = 15\)", node.text)
        assert found and 15 <= int(found[1]) <= 30, node.text  # a busy machine looks a second late
        assert "its process is stopped (SIGSTOP)" in node.text


def test_a_machine_that_dies_is_named_by_the_others_with_the_command_that_does_without(
    going, place: Place, bed: Bed
) -> None:
    nodes, run = going
    command = nodes[1].command  # no longer found below a shell that is gone
    nodes[1].process.kill()
    command.kill()
    assert end(nodes[:1]) == [1]
    assert "error: node 1 (mh1) is lost" in nodes[0].text, nodes[0].text
    [command] = [line for line in nodes[0].text.splitlines() if line.startswith("    on mh0: ")]
    words = shlex.split(command.partition(": ")[2])
    assert words[:4] == ["python", "-m", "manyhands", "train"] and words[-2:] == ["--nodes", "1"], command
    alone = bed.start(0, sys.executable, *words[1:], "--dry-run", environment=place.variables(None, None))
    assert alone.wait() == 0 and planned_ranks(run, 2) == 1, alone.text


def test_a_link_that_is_cut_ends_both_sides(going, bed: Bed) -> None:
    nodes, _ = going
    bed.cut(1)
    assert end(nodes) == [1, 1]
    for node, other in zip(nodes, ("node 1 (mh1)", "node 0 (mh0)"), strict=True):
        assert f"error: {other} is lost" in node.text and "nothing was heard from it for 15 s" in node.text, node.text


@pytest.mark.parametrize("going", ["manyhands", "torchrun"], indirect=True)
def test_sigterm_to_one_launcher_saves_and_ends_all(going, request: pytest.FixtureRequest) -> None:
    nodes, run = going
    nodes[1].command.terminate()
    codes = end(nodes)
    assert run.steps_saved() and run.read("status.json")["state"] == "interrupted", [node.text for node in nodes]
    if "manyhands" in request.node.name:
        assert codes == [143, 143]
        assert all("SIGTERM: the run has ended, saved at step" in node.text for node in nodes)


@pytest.mark.parametrize("going", ["torchrun"], indirect=True)
def test_a_link_that_is_cut_ends_torchrun_too(going, bed: Bed) -> None:
    nodes, _ = going
    bed.cut(1)
    assert all(code != 0 for code in end(nodes))
    for node in nodes:
        assert "have lost each other: a link between mh0 and mh1 is probably cut" in node.text, node.text
    assert all("error: " in node.text for node in nodes)
