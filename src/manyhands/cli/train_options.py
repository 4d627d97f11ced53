"""Options of ``train`` that other tools' guides use, as what they are here: the run file, overrides, TensorBoard."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.process import HOST, refuse_missing_tensorboard, refuse_used_port
from manyhands.core.errors import UserError

if TYPE_CHECKING:
    from manyhands.config.schema import RunConfig
    from manyhands.launch.run.folder import RunFolder

GRACE_S = 10.0


def choose_run_file(
    run: str | None, config: Path | None, overrides: list[str] | None, short: Mapping[str, Any]
) -> tuple[Path | None, list[str]]:
    """The run file (by position or --config; none where options make the run) and the overrides. UserError for two."""
    overrides = list(overrides or ())
    if run is not None and "=" in run and (config is not None or short) and not Path(run).exists():
        overrides.insert(0, run)
        run = None  # the first word is an override
    if run is not None and config is not None:
        raise UserError(
            "two run files are given", where=f"command line: {run} and --config {config}", fix="remove one of them"
        )
    return config if run is None else Path(run), overrides


def check_type(asked: str | None, config: RunConfig) -> None:
    """UserError where ``--type`` names a training that there is not, or not the one that the run file describes."""
    from manyhands.config.tasks import TASKS

    if asked is None:
        return
    if asked not in TASKS:
        raise UserError(
            f"unsupported training type {asked!r}",
            where="command line: --type",
            why="; ".join(f"{task.name}: {task.description}" for task in TASKS.values()),
            fix=f"choose --type {' or --type '.join(TASKS)}",
        )
    if asked != config.task:
        raise UserError(
            f"--type {asked} contradicts the run file's task: {config.task}",
            where="command line: --type",
            fix=f"remove --type, or set task={asked}",
        )


def choose_place(
    config: RunConfig, node_rank: int | None, rendezvous: str | None, accelerate: Path | None = None
) -> dict[str, Any]:
    """What ``start`` takes for a run on several machines; nothing for one. ``accelerate``: a file that may
    say it in their place. UserError where an option is missing."""
    from manyhands.launch.nodes.address import Address
    from manyhands.launch.restart.restarts import Place, command_without_place

    nodes = config.parallel.nodes
    if accelerate is not None and nodes not in ("auto", 1) and node_rank is None and rendezvous is None:
        from manyhands.config.read import read_run_file
        from manyhands.importers.accelerate import read_place

        node_rank, rendezvous = read_place(read_run_file(accelerate).mapping)
    given = [node_rank is not None, rendezvous is not None]
    if not any(given):
        return _place_in_step(config)
    if nodes == "auto" or not all(given):
        missing = ["--nodes"] * (nodes == "auto") + ["--node-rank"] * (not given[0]) + ["--rendezvous"] * (not given[1])
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            where="command line",
            why="a run on several machines is started on each: how many there are, which one this is, where node 0 is",
            fix="manyhands train RUN.yaml --nodes 2 --node-rank 0 --rendezvous HOST:29400, with rank 1 on the other",
        )
    assert node_rank is not None and rendezvous is not None
    if node_rank >= nodes:
        raise UserError(
            f"there is no node {node_rank} of {nodes}",
            where="--node-rank",
            fix=f"number the machines from 0 to {nodes - 1}",
        )
    if nodes == 1:
        return {}
    words = command_without_place(sys.argv)
    return {"place": Place(node_rank, nodes, Address.parse(rendezvous, "--rendezvous"), words)}


def _place_in_step(config: RunConfig) -> dict[str, Any]:
    """The same for a task of SLURM's srun, where there is one on each node."""
    from manyhands.launch.nodes.address import Address
    from manyhands.launch.restart.restarts import Place, command_without_place
    from manyhands.launch.slurm import read_place, refuse_unknown_host

    found = read_place()
    if found is None:
        return {}
    node, num_nodes, host, port = found
    if config.parallel.nodes not in ("auto", num_nodes):
        raise UserError(
            f"the run is for {config.parallel.nodes} machine(s), and srun has started it on {num_nodes}",
            where=f"parallel.nodes: {config.parallel.nodes}",
            fix=f"set parallel.nodes={num_nodes}, or srun --nodes={config.parallel.nodes}",
        )
    refuse_unknown_host(host)
    return {"place": Place(node, num_nodes, Address(host, port), command_without_place(sys.argv), by_srun=True)}


def plan_tensorboard(config: RunConfig, port: int) -> dict[str, Any]:
    """Arguments of ``start`` for TensorBoard beside the run. UserError, before anything starts, if it cannot run."""
    if not config.log.tensorboard:
        raise UserError(
            "the run would write nothing for TensorBoard",
            where="log.tensorboard: false",
            fix="remove that key, or start without --tensorboard",
        )
    refuse_missing_tensorboard()
    refuse_used_port(port)
    return {"beside": functools.partial(tensorboard_beside, port=port)}


@contextlib.contextmanager
def tensorboard_beside(folder: RunFolder, port: int) -> Iterator[None]:
    """TensorBoard on the run's curves for as long as the run lasts.

    In a process group of its own, so that Ctrl-C reaches the run alone; not in a session of its own, by which ranks are
    known.
    """
    folder.tensorboard.mkdir(exist_ok=True)
    log = folder.logs / "tensorboard.log"
    arguments = ["--logdir", str(folder.tensorboard), "--host", HOST, "--port", str(port)]
    with open(log, "ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    print(f"TensorBoard: http://{HOST}:{port}/ until the run ends", flush=True)
    try:
        yield
    finally:
        if child.poll() is not None:
            print(f"TensorBoard ended before the run (exit code {child.returncode}): see {log}", file=sys.stderr)
        _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """TensorBoard has a process of its own that reads the event files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
            return
