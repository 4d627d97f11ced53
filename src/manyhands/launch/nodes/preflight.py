"""What several nodes find out together before data is prepared: which folders they share, whether the model is there
and the same on each. Every function is called on all nodes, in the same order. Knows no torch.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import hash_files
from manyhands.data.tokenize.summary import PreparedData
from manyhands.facts.adapter import CONFIG, WEIGHTS, find_adapter
from manyhands.facts.hub import locate_model
from manyhands.facts.identity import differing_files, identify_files
from manyhands.facts.types import AdapterFacts, Figure, HostFacts
from manyhands.launch.nodes.address import address_among
from manyhands.launch.nodes.channel import Channel
from manyhands.launch.nodes.info import NodeGroup
from manyhands.launch.run.resume import find_run, folder_of, fresh_name, is_taken

SEEN_S = 10.0  # a network file system may show a new file so much later
POLL_S = 0.1

Report = Callable[[str], Any]
Made = TypeVar("Made")


def refuse_own_disks(channel: Channel, config: RunConfig) -> None:
    """UserError unless output.dir is one folder for all nodes: a checkpoint has a shard of every rank."""
    folder = Path(config.output.dir).expanduser()
    made = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]  # innermost first
    leaders = find_leaders(channel, "output", folder)
    apart = [node for node, leader in enumerate(leaders) if leader != 0]
    if apart:
        names = channel.names
        with contextlib.suppress(OSError):  # another node's files may be there
            for path in made:
                path.rmdir()
        raise UserError(
            f"output.dir is not shared: {', '.join(names[node] for node in apart)} "
            f"{'does' if len(apart) == 1 else 'do'} not see what {names[0]} writes there",
            where=f"output.dir: {config.output.dir} ({folder.absolute()} on {names[channel.node]})",
            why="a checkpoint has a shard of every rank, and resuming or exporting it reads all of them",
            fix="set output.dir to a folder that all nodes mount (NFS, Lustre, FSx, ...); "
            "model and data.cache may be on each node's own disk",
        )


def find_leaders(channel: Channel, key: str, folder: Path, *, required: bool = True) -> list[int]:
    """For each node the first one that has the same ``folder``: each writes a file there and looks for the others'.

    UserError where a node cannot write there; unless it is ``required``: then that node is the first of its own.
    """
    own = folder / f".manyhands-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(own.name, encoding="ascii")
        written = True
    except OSError as error:
        written = False
        if required:
            raise UserError(
                f"{channel.names[channel.node]} cannot write into a folder of the run",
                where=str(folder),
                why=error.strerror or str(error),
                fix="correct its permissions on that machine, or name another folder",
            ) from error
    try:
        tokens = channel.gather(f"{key} token", own.name if written else None)
        seen = _look_for(folder, tokens)
        leaders = channel.gather(f"{key} seen", seen)
    finally:
        own.unlink(missing_ok=True)
    # Sharing is mutual: a node of another group sees none of these files.
    return [min((other for other, has in enumerate(row) if has), default=node) for node, row in enumerate(leaders)]


def _look_for(folder: Path, tokens: Sequence[str | None]) -> list[bool]:
    deadline = time.monotonic() + SEEN_S
    found = [False] * len(tokens)
    while True:
        for node, token in enumerate(tokens):
            with contextlib.suppress(OSError):
                found[node] = found[node] or (token and (folder / token).read_text(encoding="ascii") == token) or False
        if all(found) or time.monotonic() > deadline or not _is_network(folder):
            return found
        time.sleep(POLL_S)


def _is_network(folder: Path) -> bool:
    """Whether the folder's file system may show another machine's files later; unknown ones may."""
    kind, longest = "", -1
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8") as mounts:
        path = os.path.realpath(folder)
        for line in mounts:
            _, place, name, *_ = line.split()
            if (path == place or path.startswith(place.rstrip("/") + "/")) and len(place) > longest:
                kind, longest = name, len(place)
    return kind not in ("ext4", "ext3", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "ramfs")


def in_turn(channel: Channel, key: str, folder: Path, work: Callable[[], Made], *, required: bool = True) -> Made:
    """``work()`` on every node, first on one of those that share ``folder``: the others find its result there."""
    leads = find_leaders(channel, key, folder, required=required)[channel.node] == channel.node
    first = [work()] if leads else []
    channel.gather(f"{key} made", True)
    return first[0] if leads else work()


def find_model(channel: Channel, config: RunConfig, report: Report) -> Path:
    """This node's model folder, fetched once per cache. UserError where it is missing or differs between nodes."""
    from huggingface_hub.constants import HF_HUB_CACHE

    model = config.model
    folder = in_turn(
        channel,
        "hub cache",
        Path(HF_HUB_CACHE),
        lambda: locate_model(
            model.name,
            model.revision,
            model.init == "pretrained",
            trust_remote_code=model.trust_remote_code,
            report=report,
        ),
        required=False,  # a cache that others have filled may be read-only
    )
    found = channel.gather("model", identify_files(folder, config, report))
    where = f"model.name: {model.name} ({folder} on {channel.names[channel.node]})"
    fix = "put the same files on every machine (model.revision pins a commit of the hub)"
    refuse_other_files(channel, found, "model", where, fix)
    return folder


def find_same_adapter(channel: Channel, config: RunConfig, report: Report) -> AdapterFacts | None:
    """The adapter that the run continues, if any. UserError where its files differ between nodes."""
    adapter = find_adapter(config, report)
    if adapter is None:
        return None
    files = [Path(adapter.folder) / name for name in (CONFIG, WEIGHTS)]
    try:
        digests = {path.name: digest for path, digest in hash_files(files).items()}
    except OSError as error:
        raise UserError("the adapter's files cannot be read", where=adapter.folder, why=str(error)) from error
    where = f"method.adapter: {config.method.adapter}"
    refuse_other_files(
        channel, channel.gather("adapter", digests), "adapter", where, "put the same files on every machine"
    )
    return adapter


def refuse_other_files(channel: Channel, found: Sequence[Mapping[str, str]], what: str, where: str, fix: str) -> None:
    """UserError where the files of ``what``, by digest, are not on every node those of node 0."""
    for node, files in enumerate(found):
        changed = differing_files(found[0], files)
        if changed:
            first, other = channel.names[0], channel.names[node]
            raise UserError(
                f"the {what} on {other} is not the one on {first}",
                where=where,
                why=f"its files differ ({first} -> {other}, by SHA-256)",
                fix=fix,
                details=changed,
            )


def prepare_data(channel: Channel, config: RunConfig, folder: Path, report: Report) -> PreparedData:
    """The prepared samples on this node: made once for those that share data.cache. UserError where they differ."""
    from manyhands.data.tokenize.prepare import prepare

    cache = Path(config.data.cache).expanduser()
    data = in_turn(channel, "data cache", cache, lambda: prepare(config, folder, report))
    found = channel.gather("data", [data.digest, data.content])
    for node, names in enumerate(found):
        if names != found[0]:
            first, other = channel.names[0], channel.names[node]
            raise UserError(
                f"the data on {other} is not the data on {first}",
                where=f"data.train, as {channel.names[channel.node]} sees it",
                why=f"the samples made of it differ: {found[0][0][:12]} on {first}, {names[0][:12]} on {other}"
                if names[0] != found[0][0]
                else "equal files gave other tokens",
                fix="put the same data files, tokenizer and chat template on every machine",
            )
    return data


def find_places(channel: Channel, config: RunConfig, report: Report) -> tuple[PreparedData, dict[str, str]]:
    """Model, adapter and samples on this node, the same by content on all, and where they are here."""
    folder = find_model(channel, config, report)
    adapter = find_same_adapter(channel, config, report)
    data = prepare_data(channel, config, folder, report)
    places = {"model_folder": str(folder), "data_folder": data.folder}
    if adapter is not None:
        places["adapter_folder"] = adapter.folder
    return data, places


def read_link(channel: Channel, addresses: Sequence[str | None], root: Path = Path("/")) -> Figure | None:
    """GB/s of the slowest node as drivers state: all InfiniBand and RoCE ports, else its network card; or None."""
    speed = 0.0
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        with contextlib.suppress(OSError):
            rate = re.match(r"[\d.]+", (port / "rate").read_text())
            if rate is not None and "ACTIVE" in (port / "state").read_text():
                speed += float(rate[0]) / 8
    own, cards = addresses[channel.node] or address_among(addresses), psutil.net_if_stats()
    if not speed and own is not None:
        named = [name for name, found in psutil.net_if_addrs().items() if own in {each.address for each in found}]
        speed = max((cards[name].speed / 8000 for name in named if name in cards), default=0.0)  # of Mbit/s
    speeds = channel.gather("links", speed)
    return Figure(value=min(speeds), source="the drivers of network adapters") if min(speeds) > 0 else None


def find_group(
    channel: Channel,
    config: RunConfig,
    hosts: tuple[HostFacts, ...],
    num_ranks: tuple[int, ...],
    addresses: Sequence[str | None],
    *,
    fresh: bool,
    report: Report,
) -> tuple[RunConfig, NodeGroup | None]:
    """All that nodes find out together; the run, under another name if ``fresh``, and None where it is finished."""
    refuse_own_disks(channel, config)
    found = None
    if channel.node == 0:
        config = fresh_name(config, is_taken) if fresh else config
        found = [config.name, find_run(folder_of(config), config)]
    name, state = channel.gather("run", found)[0]
    config = config.model_copy(update={"name": name})
    if state == "finished":
        return config, None
    link = read_link(channel, addresses)
    data, places = find_places(channel, config, report)
    return config, NodeGroup(hosts, num_ranks, data, places, link)
