"""The channel between the launchers of a run's nodes: lines of JSON over TCP. Knows no torch and nothing of runs.

Node 0 listens; the others connect to it, and what they send to each other goes through it. One thread of each launcher
owns the sockets and never blocks, so a link that is cut, on which torch's store hangs without a limit, is noticed:
every node sends a line a second, and silence for longer than ``silence_s`` is the end of a node for all others.

Both ends of a connection prove first that they know the secret of the run (``address.py``). Who does not is
dropped without an answer, and so is who takes longer for it than ``ANSWER_S``, whatever it sends meanwhile.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.launch.nodes.address import (
    Address,
    Link,
    address_among,
    is_own,
    is_proof,
    new_nonce,
    open_connection,
    open_listener,
    prove,
    query,
    set_options,
)
from manyhands.launch.nodes.info import clean_name, explain_ending, explain_lost, explain_missing, explain_unreachable

BEAT_S = 1.0
FLUSH_S = 2.0  # for the last words of a launcher that ends
SILENT = "silent"  # UserError.kind of a node that is not heard any more: its link, or all of it, is gone
LINGER_S = 15.0  # that node 0 waits with an error for nodes that have not come yet
ANSWER_S = 10.0  # that a node waits longer than node 0 does: its error names the node that is missing
MAX_STRANGERS = 64  # connections at a time that have proven nothing yet; the oldest makes room
_READ_BYTES = 1 << 16

Message = dict[str, Any]


class Channel:
    """One launcher's end. ``trouble`` is why the run cannot go on, once another node has said so or is lost.

    ``names``: host names by node, complete once all have come. ``handlers``: called by the kind of a message, in the
    channel's thread. ``beats``: what each node has put into its last beat. ``on_trouble`` is called once, in that
    thread.
    """

    def __init__(self, node: int, num_nodes: int, info: Message, *, silence_s: float, secret: bytes) -> None:
        self.node, self.num_nodes, self.silence_s, self._secret = node, num_nodes, silence_s, secret
        self.infos: dict[int, Message] = {node: info}
        self.trouble: UserError | None = None
        self.lost: dict[int, UserError] = {}
        self.beats: dict[int, Any] = {}
        self.beat_fields: Callable[[], Any] = lambda: None
        self.handlers: dict[str, Callable[[Message], None]] = {}
        self.on_trouble: Callable[[UserError], None] = lambda error: None
        self.admit: Callable[[dict[int, Message], Message], UserError | None] = lambda known, info: None
        self._links: list[Link] = []
        self._left: set[int] = set()
        self._values: dict[str, dict[int, Any]] = {}
        self._gathered: dict[str, dict[int, Any]] = {}
        self._complete = num_nodes == 1
        self.is_closed = False
        self._num_come = 0  # connections that have said hello, refused ones included
        self._lock = threading.Condition(threading.RLock())
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)

    @property
    def names(self) -> list[str]:
        return [str(self.infos.get(node, {}).get("host", f"node {node}")) for node in range(self.num_nodes)]

    @property
    def local_host(self) -> str | None:
        """This machine's address on its connections to the others; None where there are several, or none has come."""
        with self._lock:
            links = [link for link in self._links if link.node is not None and link.node >= 0]
            found = {str(link.socket.getsockname()[0]).removeprefix("::ffff:") for link in links}
        return found.pop() if len(found) == 1 else None

    @property
    def address(self) -> str | None:
        """At which the other nodes reach this one: the loopback's only where all are one machine. None: not known."""
        addresses = [info.get("address") for info in self.infos.values()]
        return self.infos[self.node].get("address") or address_among(addresses) or self.local_host

    def describe(self, node: int) -> str:
        return f"node {node} ({self.names[node]})" if node in self.infos else f"node {node}"

    # Coming together.

    def listen(self, address: Address) -> int:
        """On node 0; returns the port (0: a free one). UserError: in use, unresolved, or another machine is node 0."""
        self._listener = open_listener(address, self.num_nodes + 8)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        if not is_own(address):  # a service's address that leads here, or another machine's
            threading.Thread(target=self._look_for_another, args=(address,), name="node-0", daemon=True).start()
        return int(self._listener.getsockname()[1])

    def _look_for_another(self, address: Address) -> None:
        while not self._complete and not self.is_closed and self.trouble is None:
            answer = query(address, {"kind": "hello", "node": 0, "hello": self.infos[0]}, self._secret)
            if "error" in answer:
                with self._lock:
                    self._have_trouble(UserError.from_json(answer["error"]))
            time.sleep(BEAT_S)

    def connect(self, address: Address, timeout_s: float, report: Callable[[str], object] = lambda line: None) -> None:
        """On any other node. UserError where node 0 does not answer in time."""
        try:
            hello = {"kind": "hello", "node": self.node, "hello": self.infos[self.node]}
            connection = open_connection(address, hello, self._secret, timeout_s + ANSWER_S, report)
        except OSError as error:
            raise explain_unreachable(self.describe(self.node), str(address), timeout_s, error) from error
        link = Link(connection, node=0)
        self._links.append(link)
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        self._thread.start()

    def wait_for_all(self, timeout_s: float) -> list[Message]:
        """Every node's hello, in their order. UserError, on every node that is there, naming those that are not."""
        deadline = time.monotonic() + timeout_s + (ANSWER_S if self.node else 0.0)
        with self._lock:
            while not self._complete:
                if self.trouble is not None:
                    self._lock.wait_for(lambda: self.node or self._num_come >= self.num_nodes - 1, LINGER_S)
                    raise self.trouble
                if time.monotonic() >= deadline:
                    break
                self._lock.wait(deadline - time.monotonic())
            if self._complete:
                return [self.infos[node] for node in range(self.num_nodes)]
            missing = [node for node in range(self.num_nodes) if node not in self.infos]
            there = ", ".join(self.describe(node) for node in sorted(self.infos))
        error = explain_missing(missing, self.num_nodes, there, timeout_s)
        self.fail(error)
        raise error

    # What nodes send each other.

    def post(self, kind: str, to: int | None = None, **fields: Any) -> None:
        """To node ``to``, or to all others. Does not wait."""
        with self._lock:
            self._relay({"kind": kind, "node": self.node, "to": to, **fields})
        self._wake()

    def gather(self, key: str, value: Any, *, partial: bool = False, timeout_s: float | None = None) -> list[Any]:
        """What every node has given for ``key``, in the order of nodes; waits for all of them, up to ``timeout_s``.

        Raises what another node has failed with. ``partial``: instead, None stands for a node that is lost, has left or
        has not answered in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            if self.node == 0:
                self._collect(key, 0, value)
            else:
                self.post("value", key=key, value=value)
            while key not in self._gathered:
                if not partial and self.trouble is not None:
                    raise self.trouble
                if self.node and 0 in self.lost.keys() | self._left:  # who would hand it out
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    break
                self._lock.wait(None if deadline is None else deadline - time.monotonic())
            found = self._gathered.get(key, {**self._values.get(key, {}), self.node: value})
            if not partial and len(found) < self.num_nodes:
                gone = next(node for node in range(self.num_nodes) if node not in found)
                raise self.trouble or explain_lost(self.describe(gone), self.describe(self.node), "it has left the run")
            return [found.get(node) for node in range(self.num_nodes)]

    def fail(self, error: UserError) -> None:
        """The run cannot go on, for a reason that every other node shows."""
        with self._lock:
            if self.trouble is None:
                self.trouble = error
        self.post("trouble", error=error.to_json())

    @contextlib.contextmanager
    def when_in_trouble(self, act: Callable[[UserError], None]) -> Iterator[None]:
        """Within, ``act`` is called in the channel's thread, once; at once where there is trouble already."""
        with self._lock:
            self.on_trouble = act
            if self.trouble is not None:
                act(self.trouble)
        try:
            yield
        finally:
            with self._lock:
                self.on_trouble = lambda error: None

    def close(self) -> None:
        """Leaves in order: the others do not take this node for lost. What was posted is sent first."""
        if not self._thread.is_alive():
            return
        self.post("left")
        with self._lock:
            self.is_closed = True
        self._wake()
        self._thread.join(FLUSH_S + 1)

    # The thread.

    def _run(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:  # a bug: unless it ends the run, whoever gathers waits without a limit
            traceback.print_exc()
            what = f"unexpected error in the channel of {self.describe(self.node)}: {type(error).__name__}: {error}"
            with self._lock:
                self._have_trouble(UserError(what, where="its output has the traceback", exit_code=EXIT_FAILED))
        finally:
            with self._lock:
                for link in self._links:
                    link.socket.close()
                if self._listener is not None:
                    self._listener.close()
                self._selector.close()
                self._lock.notify_all()

    def _serve_until_closed(self) -> None:
        last = beaten = time.monotonic()
        closing_at: float | None = None
        while True:
            for key, events in self._selector.select(BEAT_S / 4):
                self._serve(key, events)
            now = time.monotonic()
            # A launcher that was itself stopped (a suspended laptop) must not blame the others for the gap.
            elapsed_s, last = min(now - last, BEAT_S), now
            with self._lock:
                if now - beaten >= BEAT_S:
                    beaten = now
                    self._beat()
                for link in list(self._links):
                    link.silent_s += elapsed_s
                    if link.silent_s > (ANSWER_S if link.node is None else self.silence_s) and not self.is_closed:
                        why = f"nothing was heard from it for {self.silence_s:g} s: it hangs, or its link is cut"
                        self._lose(link, why, kind=SILENT)
                    else:
                        self._flush(link)
                if self.is_closed:
                    closing_at = closing_at or now
                    if now - closing_at > FLUSH_S or not any(link.unsent for link in self._links):
                        return

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        with self._lock:
            if key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(_READ_BYTES)
            elif key.fileobj is self._listener:
                self._accept()
            elif key.data in self._links and events & selectors.EVENT_READ:
                self._read(key.data)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            set_options(connection)
            strangers = [link for link in self._links if link.node is None and link.nonces is None]
            for link in strangers[: len(strangers) + 1 - MAX_STRANGERS]:
                self._drop(link)
            link = Link(connection)
            self._links.append(link)
            self._selector.register(connection, selectors.EVENT_READ, link)

    def _read(self, link: Link) -> None:
        try:
            data = link.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(link, f"the connection to its launcher broke: {error.strerror or error}")
            return
        if not data:
            self._lose(link, "its launcher ended without a message")
            return
        if link.nonces is not None or link.node is not None:
            link.silent_s = 0.0
        link.received += data
        try:
            for message in map(json.loads, link.lines()):
                if link.node is None and link.nonces is None:
                    self._open(link, message)
                elif link.node is None:
                    self._greet(link, message)
                elif link.node >= 0:
                    self._take(message if self.node else message | {"node": link.node})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if link.node is not None and link.node >= 0:
                raise
            self._drop(link)  # a stranger that has found the port

    def _flush(self, link: Link) -> None:
        if link.unsent:
            try:
                link.send()
            except OSError as error:
                self._lose(link, f"the connection to its launcher broke: {error.strerror or error}")
                return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        self._selector.modify(link.socket, wanted, link)

    def _beat(self) -> None:
        message = {"kind": "beat", "node": self.node, "fields": self.beat_fields()}
        for link in self._links:
            if link.node is not None:
                link.add(message if self.node else {"kind": "beat", "node": 0, "fields": None})

    def _open(self, link: Link, message: Message) -> None:
        """On node 0: the first line of a connection, from who proves that it knows the secret."""
        its = message["nonce"]
        if message["kind"] != "knock" or not is_proof(message["proof"], self._secret, "knock", its):
            raise ValueError("does not know the secret")
        link.nonces = its, new_nonce()
        proof = prove(self._secret, "open", *link.nonces)
        link.add({"kind": "open", "nonce": link.nonces[1], "proof": proof})

    def _greet(self, link: Link, message: Message) -> None:
        """On node 0: the second line, with what a node says of itself."""
        kind, node = message["kind"], message["node"]
        if not is_proof(message["proof"], self._secret, "hello", *(link.nonces or ())):
            raise ValueError("does not know the secret")
        if kind != "hello" or type(node) is not int or node != message["hello"]["node"]:
            raise ValueError("no hello")
        message["hello"]["host"] = clean_name(message["hello"]["host"])
        if message["hello"] == self.infos[0]:
            link.add({"kind": "self"})
            return
        self._num_come += 1
        self._lock.notify_all()
        error = None if self._complete else self.trouble  # of one that came before
        if self._complete and node in self.lost.keys() | self._left:
            error = explain_ending(self.describe(node), self.describe(0))
        error = error or self.admit(self.infos, message["hello"])
        if error is not None:
            link.add({"kind": "trouble", "node": 0, "error": error.to_json()})
            link.node = -1  # heard until it ends, and no part of the run
            if not self._complete and self.trouble is None:
                self._have_trouble(error)
                self._relay({"kind": "trouble", "node": 0, "to": None, "error": error.to_json()})
            return
        link.node = node
        link.add({"kind": "beat", "node": 0, "fields": None})  # at once: by its answer a node 0 is known
        self.infos[node] = message["hello"]  # which all others get from here
        if len(self.infos) == self.num_nodes:
            self._complete = True
            self._relay({"kind": "welcome", "node": 0, "to": None, "infos": list(self.infos.items())})

    def _relay(self, message: Message) -> None:
        """To whom it is meant; by way of node 0 from any other."""
        for link in self._links:
            is_meant = link.node != message["node"] and message.get("to") in (None, link.node)
            if self.node or (link.node is not None and is_meant):
                link.add(message)

    def _take(self, message: Message) -> None:
        kind, node = message["kind"], message["node"]
        if kind == "beat":
            self.beats[node] = message["fields"]
            return
        if kind == "value" and self.node == 0:
            self._collect(message["key"], node, message["value"])
            return
        if self.node == 0:
            self._relay(message)
            if message.get("to") not in (None, 0):
                return
        if kind == "welcome":
            self.infos = {int(number): hello for number, hello in message["infos"]}
            self._complete = True
        elif kind == "gathered":
            self._gathered[message["key"]] = {int(n): value for n, value in message["values"].items()}
        elif kind == "trouble":
            self._have_trouble(UserError.from_json(message["error"]))
        elif kind == "lost":
            error = UserError.from_json(message["error"])
            self.lost[message["which"]] = error
            self._have_trouble(error)
        elif kind == "left":
            self._left.add(node)
            self._check_gathers()
        elif kind in self.handlers:
            self.handlers[kind](message)
        self._lock.notify_all()

    def _collect(self, key: str, node: int, value: Any) -> None:
        self._values.setdefault(key, {})[node] = value
        self._check_gathers()

    def _check_gathers(self) -> None:
        """On node 0: hands out what all living nodes have given."""
        if self.node:
            return
        for key, values in list(self._values.items()):
            if all(n in values or n in self.lost or n in self._left for n in range(self.num_nodes)):
                self._gathered[key] = self._values.pop(key)
                self._relay({"kind": "gathered", "node": 0, "to": None, "key": key, "values": values})
        self._lock.notify_all()

    def _lose(self, link: Link, why: str, kind: str = "") -> None:
        self._drop(link)
        node = link.node
        if node is None or node < 0 or node in self._left or self.is_closed:
            return
        error = explain_lost(self.describe(node), self.describe(self.node), why, kind)
        self.lost[node] = error
        if self.node == 0:
            self._relay({"kind": "lost", "node": 0, "to": None, "which": node, "error": error.to_json()})
            self._check_gathers()
        self._have_trouble(error)
        self._lock.notify_all()

    def _drop(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.socket)
            link.socket.close()

    def _have_trouble(self, error: UserError) -> None:
        if self.trouble is None:
            self.trouble = error
            self._lock.notify_all()
            self.on_trouble(error)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
