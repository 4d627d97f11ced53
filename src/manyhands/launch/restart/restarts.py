"""Whether a launch that a fault has ended is started again, and when; and how a run on several nodes continues after
some are lost: with which nodes, under which numbers, by which command. Knows no torch.

A fault is what may be gone at the next attempt: a process that was killed or crashed, a rank that hangs, an unexpected
error, a lost connection. What the user has to change (``UserError``) is none, and neither is a signal to this process.
"""

import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.launch.local.heartbeat import read_beats
from manyhands.launch.nodes.address import Address
from manyhands.launch.nodes.info import FIX_OF_LOST, MISSING, UNREACHABLE
from manyhands.launch.run.folder import RunFolder

FIRST_WAIT_S = 0.0  # before the first of several restarts in a row
WAIT_S = 1.0  # before the second; doubled with each further one
MAX_WAIT_S = 60.0
TRAINING = ("train", "checkpoint")  # stages between the first step and the last
MAX_COMMANDS = 8  # of a run on hundreds of nodes the others follow from these
_OF_THE_PLACE = ("--nodes", "--node-rank", "--rendezvous", "parallel.nodes", "--parallel.nodes")
_OF_THE_NUMBER = ("--gpus", "parallel.gpus", "--parallel.gpus")


@dataclass(frozen=True)
class Restart:
    """One restart, as it is announced and recorded."""

    cause: str
    step: int | None  # the last one that was done
    from_step: int | None  # what the next attempt resumes from; None: from the start
    attempt: int
    of: int
    begun: int | None = None  # the newest that any rank has begun
    lost: str = ""  # devices that are lost, and what is left: another plan follows

    @property
    def lost_steps(self) -> int:
        """Steps that are done again, the one in flight included."""
        return max(0, (self.step or 0) - (self.from_step or 0), (self.begun or 0) - (self.from_step or 0))

    @property
    def wait_s(self) -> float:
        return FIRST_WAIT_S if self.attempt == 1 else min(WAIT_S * 2 ** (self.attempt - 2), MAX_WAIT_S)

    def __str__(self) -> str:
        begin = "from the start" if self.from_step is None else f"from step {self.from_step}"
        begin += f" in {self.wait_s:g} s" if self.wait_s else ""
        lost = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)} lost"
        cause = f"{self.cause}; {self.lost}" if self.lost else self.cause
        return f"{cause}; restarting {begin}, {lost} (attempt {self.attempt} of {self.of})"

    def to_json(self) -> dict[str, Any]:
        fields = {"cause": self.cause, "step": self.step, "from_step": self.from_step, "lost_steps": self.lost_steps}
        fields |= {"lost": self.lost} if self.lost else {}
        return {"time": time.time(), **fields, "attempt": self.attempt, "of": self.of, "wait_s": self.wait_s}


@dataclass
class Restarts:
    """Restarts of one `manyhands train`: at most ``limit`` in a row without a newer checkpoint."""

    folder: RunFolder
    limit: int
    num_in_a_row: int = 0
    from_step: int | None = None  # of the latest restart
    seen: set[tuple[str, int | None]] = field(default_factory=set)

    def decide(self, error: UserError, lost: str = "") -> Restart:
        """The restart after the fault ``error``. Raises it, with what was tried, where another attempt is pointless:
        the same error came at the same step as before, or there were too many in a row. Where devices are ``lost`` the
        next attempt is on others, so that neither counts.
        """
        if not self.limit:
            raise error
        newest = self.folder.newest_step()
        # The last step that is known to be done, and the newest that any rank has begun in training.
        beats = read_beats(self.folder).values()
        begun = max((b.begun for b in beats if b.begun is not None and b.stage in TRAINING), default=None)
        done = [beat.step for beat in beats if beat.step is not None]
        if begun is not None and begun > 1:  # of steps faster than records all before it are done
            done.append(begun - 1)
        step = max(done, default=None)
        step = newest if step is None else step
        fault = re.sub(r"\d+", "#", error.what), step
        if lost:
            self.seen.clear()
            self.num_in_a_row = 0
        if fault in self.seen:
            place = "before the first step" if step is None else f"after step {step}"
            raise with_finding(error, f"it is the second time {place} in this launch: another restart would not help")
        if newest is not None and (self.from_step is None or newest > self.from_step):
            self.num_in_a_row = 0
        if self.num_in_a_row >= self.limit:
            tried = f"{self.limit} restart{'s' * (self.limit != 1)} in a row brought no new checkpoint"
            raise with_finding(error, f"{tried} (launch.restarts = {self.limit})")
        self.seen.add(fault)
        self.num_in_a_row, self.from_step = self.num_in_a_row + 1, newest
        return Restart(error.what, step, newest, self.num_in_a_row, self.limit, begun, lost)


def with_finding(error: UserError, finding: str) -> UserError:
    """The error with one more detail."""
    error.details = (*error.details, finding)
    return error


@dataclass(frozen=True)
class Place:
    """What ``--nodes``, ``--node-rank`` and ``--rendezvous`` say. ``words``: the command that was given, without them;
    ``by_srun``: a step of SLURM says it instead.
    """

    node: int
    num_nodes: int
    rendezvous: Address
    words: tuple[str, ...] = field(default=("manyhands", "train", "RUN.yaml"), compare=False)
    by_srun: bool = False


class NodesLeft(Exception):
    """Some nodes are lost, and those of ``left``, in which this node is, go on: all of them come together again."""

    def __init__(self, left: Sequence[int]) -> None:
        super().__init__(left)
        self.left = list(left)


def nodes_there(error: UserError, place: Place) -> list[int]:
    """Those that had come where ``error`` says that others have not; all others where it says that node 0 does not
    answer; none where it says something else, or that this one has not come.
    """
    missing = {MISSING: set(error.data.values()), UNREACHABLE: {0}}.get(error.kind, set(range(place.num_nodes)))
    return [node for node in range(place.num_nodes) if node not in missing] if place.node not in missing else []


def place_among(place: Place, left: Sequence[int], infos: Mapping[int, Mapping[str, Any]]) -> Place | None:
    """This node's among those that are left, the first of which is node 0 of them; None where it is the only one."""
    if len(left) == 1:
        return None
    return Place(left.index(place.node), len(left), rendezvous_of(place, left, infos), place.words, place.by_srun)


def rendezvous_of(place: Place, left: Sequence[int], infos: Mapping[int, Mapping[str, Any]]) -> Address:
    """Where the nodes that are left come together: at node 0, or without it at the first of them, on the same port."""
    if 0 in left:
        return place.rendezvous
    first = infos[left[0]]
    return Address(first.get("address") or str(first["host"]), place.rendezvous.port)


def config_for(config: RunConfig, num_nodes: int, num_left: int) -> RunConfig:
    """The same run on ``num_left`` of ``num_nodes`` nodes."""
    parallel = config.parallel
    nodes = parallel.nodes if parallel.nodes == "auto" and num_left > 1 else num_left
    update = {"nodes": nodes, "gpus": scale_gpus(parallel.gpus, num_nodes, num_left)}
    return config.model_copy(update={"parallel": parallel.model_copy(update=update)})


def command_without_place(argv: Sequence[str]) -> tuple[str, ...]:
    """Of `manyhands train RUN.yaml --nodes 2 ...` all options but ``--fresh`` and those that place this node."""
    name = Path(argv[0]).name
    words = ["python", "-m", "manyhands"] if name == "__main__.py" else [name]
    return (*words, *_without([word for word in argv[1:] if word != "--fresh"], _OF_THE_PLACE))


def _without(words: Sequence[str], names: Collection[str]) -> list[str]:
    kept, skips = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skips or name in names:
            skips = not skips and not equals
        else:
            kept.append(word)
    return kept


def scale_gpus(asked: Any, num_nodes: int, num_left: int) -> Any:
    """``parallel.gpus``, the number on all nodes, where only ``num_left`` of them are left."""
    return asked if asked == "auto" else asked // num_nodes * num_left


def fix_for_lost_node(
    place: Place, infos: Mapping[int, Mapping[str, Any]], left: Sequence[int], asked: Any, least: int | None
) -> str:
    """``UserError.fix`` of a node that is lost: wait for it, or the commands of ``commands_without_lost``."""
    commands = commands_without_lost(place, infos, left, asked, least)
    return "\n    ".join([f"{FIX_OF_LOST}; to go on without what is lost, run:", *commands])


def commands_without_lost(
    place: Place, infos: Mapping[int, Mapping[str, Any]], left: Sequence[int], asked: Any, least: int | None = None
) -> list[str]:
    """Commands that restart the run on nodes ``left``. ``asked``, ``least``: parallel.gpus, launch.min_gpus."""
    words, names = list(place.words), {node: str(info["host"]) for node, info in infos.items()}
    if asked != "auto":
        words = _without(words, _OF_THE_NUMBER)
        fewer = scale_gpus(asked, place.num_nodes, len(left))
        words.append(f"parallel.gpus={fewer}")
        if least is not None and least > fewer:  # which would be refused
            words = [*_without(words, ("launch.min_gpus",)), f"launch.min_gpus={fewer}"]
    if place.by_srun:
        lost = ",".join(names[node] for node in sorted(infos) if node not in left)
        return [shlex.join(["srun", f"--nodes={len(left)}", "--ntasks-per-node=1", f"--exclude={lost}", *words])]
    if len(left) == 1:
        return [f"on {names[left[0]]}: {shlex.join([*words, '--nodes', '1'])}"]
    first, found = rendezvous_of(place, left, infos), []
    for number, node in enumerate(left[:MAX_COMMANDS]):
        options = ["--nodes", str(len(left)), "--node-rank", str(number), "--rendezvous", str(first)]
        found.append(f"on {names[node]}: {shlex.join([*words, *options])}")
    if len(left) > MAX_COMMANDS:
        found.append(f"and so on, in this order: {', '.join(names[node] for node in left[MAX_COMMANDS:])}")
    return found
