"""What is left of a run on several nodes after some are lost: who goes on, as which node, by which command. Knows no
torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.launch.address import Address
from manyhands.launch.nodes import FIX_OF_LOST, MISSING, UNREACHABLE

MAX_COMMANDS = 8  # of a run on hundreds of nodes the others follow from these
_OF_THE_PLACE = ("--nodes", "--node-rank", "--rendezvous", "parallel.nodes", "--parallel.nodes")
_OF_THE_NUMBER = ("--gpus", "parallel.gpus", "--parallel.gpus")


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


def place_among(place: Place, left: Sequence[int], hellos: Mapping[int, Mapping[str, Any]]) -> Place | None:
    """This node's among those that are left, the first of which is node 0 of them; None where it is the only one."""
    if len(left) == 1:
        return None
    return Place(left.index(place.node), len(left), rendezvous_of(place, left, hellos), place.words, place.by_srun)


def rendezvous_of(place: Place, left: Sequence[int], hellos: Mapping[int, Mapping[str, Any]]) -> Address:
    """Where the nodes that are left come together: at node 0, or without it at the first of them, on the same port."""
    if 0 in left:
        return place.rendezvous
    first = hellos[left[0]]
    return Address(first.get("address") or str(first["host"]), place.rendezvous.port)


def config_for(config: RunConfig, num_nodes: int, num_left: int) -> RunConfig:
    """The same run on ``num_left`` of ``num_nodes`` nodes."""
    parallel = config.parallel
    nodes = parallel.nodes if parallel.nodes == "auto" and num_left > 1 else num_left
    update = {"nodes": nodes, "gpus": scale_gpus(parallel.gpus, num_nodes, num_left)}
    return config.model_copy(update={"parallel": parallel.model_copy(update=update)})


def command_without_place(argv: Sequence[str]) -> tuple[str, ...]:
    """Of ``manyhands train RUN.yaml --nodes 2 --node-rank 0 --rendezvous gpu01:29400 name=x`` all but the options that
    say which node this is, and ``--fresh``.
    """
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


def how_to_go_on_without(place: Place, hellos: Mapping[int, Mapping[str, Any]], left: Sequence[int], asked: Any) -> str:
    """``UserError.fix`` of a node that is lost: wait for it, or the commands of ``commands_to_go_on``."""
    commands = commands_to_go_on(place, hellos, left, asked)
    return "\n    ".join([f"{FIX_OF_LOST}; to go on without what is lost, run:", *commands])


def commands_to_go_on(
    place: Place, hellos: Mapping[int, Mapping[str, Any]], left: Sequence[int], asked: Any
) -> list[str]:
    """What starts the run again on the nodes ``left``, a line for each; from a step of SLURM one for all. ``asked``:
    ``parallel.gpus``; ``hellos``: what each node has said of itself.
    """
    words, names = list(place.words), {node: str(hello["host"]) for node, hello in hellos.items()}
    if asked != "auto":
        words = _without(words, _OF_THE_NUMBER)
        words.append(f"parallel.gpus={scale_gpus(asked, place.num_nodes, len(left))}")
    if place.by_srun:
        lost = ",".join(names[node] for node in sorted(hellos) if node not in left)
        return [shlex.join(["srun", f"--nodes={len(left)}", "--ntasks-per-node=1", f"--exclude={lost}", *words])]
    if len(left) == 1:
        return [f"on {names[left[0]]}: {shlex.join([*words, '--nodes', '1'])}"]
    first, found = rendezvous_of(place, left, hellos), []
    for number, node in enumerate(left[:MAX_COMMANDS]):
        options = ["--nodes", str(len(left)), "--node-rank", str(number), "--rendezvous", str(first)]
        found.append(f"on {names[node]}: {shlex.join([*words, *options])}")
    if len(left) > MAX_COMMANDS:
        found.append(f"and so on, in this order: {', '.join(names[node] for node in left[MAX_COMMANDS:])}")
    return found
