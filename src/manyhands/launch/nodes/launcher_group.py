"""A launcher among those of the other nodes: how they come together, what they tell each other while workers run, and
how they agree on why the run ended. Knows no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.host import read_host_facts
from manyhands.launch.diagnose.failure import ENDED_BY_OTHERS, FoundCause
from manyhands.launch.local.watch import Watch
from manyhands.launch.nodes.address import network_environment, own_address, read_secret
from manyhands.launch.nodes.channel import SILENT, Channel
from manyhands.launch.nodes.info import LATER, NodeGroup, check_node, describe_node, explain_unopened, host_name
from manyhands.launch.restart.restarts import Place, fix_for_lost_node

SETTLE_S = 60.0  # longer than any node takes to end its workers; a node that is lost is not waited for
SAVE_S = 20.0  # from the loss of a node until ranks here that have not noticed it are killed, unless they have saved
HARD_END_S = 25.0  # from the loss of a node until this launcher ends, whatever it is stuck in
POLL_S = 0.2
RETRY_S = 1.0  # until a node that has come back too soon comes again
TIER_OF_LOST = 2  # as an exit without a report: below a cause that a rank has written


@dataclass(frozen=True)
class LaunchEnd:
    """How a launch ended here: by a signal, a failure, or well. ``reports``: of the GPUs' driver meanwhile."""

    signal: signal.Signals | None = None
    cause: FoundCause | None = None
    reports: tuple[str, ...] = ()


def open_channel(
    config: RunConfig, place: Place, report: Callable[[str], object] = print
) -> tuple[Channel, list[dict[str, Any]]]:
    """Connects to the other nodes; returns what each has sent. UserError where one is missing or a stranger."""
    timeout_s, rendezvous = float(config.parallel.timeout_s), place.rendezvous
    secret = read_secret(Path(config.output.dir))
    host = read_host_facts().model_copy(update={"name": host_name()})
    info = describe_node(config, place.node, place.num_nodes, host, own_address(rendezvous.host, rendezvous.port))
    deadline, was_early = time.monotonic() + timeout_s, False
    while True:
        channel = Channel(place.node, place.num_nodes, info, silence_s=timeout_s, secret=secret)
        channel.admit = check_node
        try:
            if place.node == 0:
                channel.listen(rendezvous)
            else:
                left_s = max(RETRY_S, deadline - time.monotonic()) if was_early else timeout_s
                channel.connect(rendezvous, left_s, report)
            return channel, channel.wait_for_all(timeout_s)
        except BaseException as error:
            channel.close()
            was_early = was_early or (isinstance(error, UserError) and error.kind == LATER)
            if not was_early or not isinstance(error, UserError) or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_S)  # node 0 is still ending what this node was lost in


class LauncherGroup:
    """This node among all for a run. ``environment``: of workers. ``asked``, ``least``: parallel.gpus, min_gpus."""

    def __init__(
        self,
        channel: Channel,
        group: NodeGroup,
        place: Place,
        environment: Mapping[str, str],
        asked: Any = "auto",
        least: int | None = None,
    ) -> None:
        self.channel, self.group, self.place, self.asked, self.least = channel, group, place, asked, least
        self.node, self.num_nodes = channel.node, channel.num_nodes
        self.environment = {**network_environment(channel.address), **environment}
        self.attempt = 0
        self._store: Any = None  # of the newest attempt, on node 0: it is there as long as it is referred to
        ends = list(accumulate(group.num_ranks))
        self._ranks = [range(end - count, end) for end, count in zip(ends, group.num_ranks, strict=True)]
        self._reported_causes: list[
            FoundCause
        ] = []  # why other nodes have failed in this attempt: they may be gone by the end
        self._stop_sent = False
        self.stop_requested = False  # to end, by a signal to this launcher or another

    @property
    def ranks(self) -> range:
        return self._ranks[self.node]

    def begin(self, open_store: Callable[[str | None], Any]) -> tuple[str, int]:
        """Before each launch: where torch's store is, which ``open_store`` opens on node 0, at the address by which the
        others reach it. A new one each time: the store of a launch that failed has its addresses.

        It listens before any other node hears of its port. Were a port only chosen here, another program might have it
        by the time torch's agent listens: this agent would fail, and the others wait at a stranger's without a limit.
        """
        self.attempt += 1
        self._reported_causes = []
        host = self.place.rendezvous.host
        if self.node == 0:
            bound = self.channel.local_host
            host = bound or host
            try:
                self._store = open_store(bound)
            except Exception as error:
                found = explain_unopened(error, self.channel.names[0])
                self.channel.fail(found)
                raise found from error
        port = self._store.port if self._store is not None else None
        return host, self.channel.gather(f"start {self.attempt}", port)[0]

    # What the watch asks.

    def name_rank(self, rank: int) -> str:
        return f"rank {rank} on {self.channel.names[self._node_of(rank)]}"

    def read_beats(self) -> Mapping[int, Mapping[str, Any]]:
        found: dict[int, Mapping[str, Any]] = {}
        for beats in list(self.channel.beats.values()):
            found |= {int(rank): fields for rank, fields in (beats or {}).items()}
        return found

    def kill_ranks(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.channel.post("kill", to=self._node_of(rank), rank=rank)

    def _node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self._ranks) if rank in ranks)

    # While workers run.

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        """Passes on signals and failures, and ends this node's workers where another node is lost."""
        channel, ended = self.channel, threading.Event()
        channel.beats.clear()
        channel.handlers = {
            "kill": lambda message: watch.kill_ranks([message["rank"]]),
            "failed": lambda message: self._expect_end(watch, FoundCause.from_json(message["cause"]), ended),
            "stopping": lambda message: self._stop_as_asked(message["signal"]),
        }
        channel.beat_fields = watch.describe_ranks
        try:
            with channel.when_in_trouble(lambda error: self._end(watch, error, ended)):
                yield
        finally:
            ended.set()
            channel.handlers = {}
            channel.beat_fields = lambda: None

    def settle(self, mine: LaunchEnd) -> LaunchEnd:
        """How the launch ended on all nodes, the same on each: the first cause, else the first signal."""
        if mine.cause is not None:
            self.channel.post("failed", cause=mine.cause.to_json())
        fields = [mine.signal, mine.cause.to_json() if mine.cause is not None else None, mine.reports]
        found = self.channel.gather(f"end {self.attempt}", fields, partial=True, timeout_s=SETTLE_S)
        ends = [each for each in found if each is not None]
        causes = [FoundCause.from_json(cause) for _, cause, _ in ends if cause is not None]
        causes += self._reported_causes if None in found else []
        self._explain_lost()
        lost = self.channel.lost or ({} if self.channel.trouble is None else {-1: self.channel.trouble})
        causes += [FoundCause(TIER_OF_LOST, time.time(), error) for error in lost.values()]
        signals = [signal.Signals(number) for number, _, _ in ends if number is not None]
        reports = tuple(report for _, _, given in ends for report in given)
        first = min(causes, key=lambda cause: (cause.tier, cause.time), default=None)
        if first is not None and not (signals and first.tier >= ENDED_BY_OTHERS):
            if first.rank is not None:
                host = self.channel.names[self._node_of(first.rank)]
                first.error.where = f"{host}, {first.error.where}" if first.error.where else host
            return LaunchEnd(cause=first, reports=reports)
        return LaunchEnd(signal=signals[0] if signals else None)

    def share_signal(self, mine: signal.Signals | None) -> signal.Signals | None:
        """Between two attempts: the signal that asks any node's launcher to end."""
        found = self.channel.gather(f"asked {self.attempt}", mine)
        return next((signal.Signals(number) for number in found if number is not None), None)

    @property
    def left(self) -> list[int]:
        """Nodes that are not lost, as far as this one knows."""
        return [node for node in range(self.num_nodes) if node not in self.channel.lost]

    def agree_on_left(self, least: int | None) -> list[int]:
        """The nodes that go on without those that are lost, as node 0 sees it; none where they have fewer than
        ``least`` ranks, or that is None.

        Where node 0 is lost, all others, as this one sees it. Of a network that is cut in two both parts may find so:
        one alone gets the lock of the run's folder.
        """
        seen = self.channel.gather(f"left {self.attempt}", self.left, partial=True, timeout_s=SETTLE_S)[0]
        if 0 in self.channel.lost:
            seen = self.left
        if least is None or seen is None or self.node not in seen:
            return []
        return list(seen) if sum(len(self._ranks[node]) for node in seen) >= least else []

    def _explain_lost(self) -> None:
        """In the error of each node that is lost: the commands that do without."""
        fix = fix_for_lost_node(self.place, self.channel.infos, self.left, self.asked, self.least)
        for error in self.channel.lost.values():
            error.fix = fix

    def _expect_end(self, watch: Watch, cause: FoundCause, ended: threading.Event) -> None:
        """Another node has failed: this one ends by the watch, or hard where its agent is stuck in torch's store."""
        self._reported_causes.append(cause)
        watch.expect_end()

        def end_hard() -> None:
            if not ended.wait(SETTLE_S):
                self._end_hard(watch, cause.error)

        threading.Thread(target=end_hard, name="failed", daemon=True).start()

    def _end(self, watch: Watch, error: UserError, ended: threading.Event) -> None:
        """A node is lost. Where its launcher alone ended, its ranks get SIGTERM as ours do, and all save together."""
        self._explain_lost()
        if error.kind == SILENT:
            watch.kill_ranks()
        else:
            self._stop(signal.SIGTERM)

        def end_ranks() -> None:
            """Those that wait for what is gone: as soon as all of them have lost it, as then none can save."""
            begin, is_killed = time.monotonic(), False
            while not ended.wait(POLL_S):
                waited_s = time.monotonic() - begin
                if not is_killed and (waited_s > SAVE_S or watch.all_failed()):
                    is_killed = True
                    watch.kill_ranks()
                if waited_s > HARD_END_S:
                    self._end_hard(watch, error)

        threading.Thread(target=end_ranks, name="lost", daemon=True).start()

    def _end_hard(self, watch: Watch, error: UserError) -> None:
        """What a cut link leaves hanging inside torch's store cannot be interrupted."""
        if not self.channel.is_closed:
            watch.kill_ranks()
            print(error, file=sys.stderr, flush=True)
            os._exit(error.exit_code)

    def _stop_as_asked(self, number: int) -> None:
        self.stop_requested = True
        self._stop(number)

    def _stop(self, number: int) -> None:
        self._stop_sent = True  # a forwarded stop is not forwarded again
        os.kill(os.getpid(), number)

    def pass_on(self, number: signal.Signals) -> bool:
        """Forwards a signal of this launcher. False where a node has sent it, or it is not the first."""
        if self._stop_sent:
            return False
        self._stop_sent = self.stop_requested = True
        self.channel.post("stopping", signal=number)
        return True
