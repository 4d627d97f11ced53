"""Files at addresses that come from outside: bounded, and none of an inner network, by whatever way it is named."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.core import remote
from manyhands.core.remote import RemoteError, fetch, is_inner


@pytest.fixture
def served() -> Iterator[tuple[int, list[str]]]:
    """The port of a server on all loopback addresses, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 5000)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0"])
def test_an_inner_host_is_not_asked(host: str, served: tuple[int, list[str]]) -> None:
    port, asked = served
    with pytest.raises(RemoteError):
        fetch(f"http://{host}:{port}/a", 10)
    assert not asked


def test_hosts_that_are_named_are_asked_and_no_others(served: tuple[int, list[str]]) -> None:
    port, asked = served
    assert fetch(f"http://127.0.0.1:{port}/a", 10_000, ["127.0.0.1"]) == b"x" * 5000
    for address in (f"http://127.0.0.2:{port}/b", f"http://127.0.0.1:{port}/to/http://127.0.0.2:{port}/b"):
        with pytest.raises(RemoteError, match=r"127\.0\.0\.2 is none of the hosts that may be asked \(127"):
            fetch(address, 10, ["127.0.0.1"])
    assert "/b" not in asked


def test_a_redirect_to_an_inner_host_is_not_followed(
    served: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, asked = served
    monkeypatch.setattr(remote, "is_inner", lambda address: address == "127.0.0.2")  # the other one is taken for public
    assert fetch(f"http://127.0.0.1:{port}/to/http://127.0.0.1:{port}/b", 10_000) == b"x" * 5000
    asked.clear()
    for target in (f"http://127.0.0.2:{port}/b", "file:///etc/passwd", f"ftp://127.0.0.1:{port}/b"):
        with pytest.raises(RemoteError):
            fetch(f"http://127.0.0.1:{port}/to/{target}", 10_000)
    assert "/b" not in asked


def test_bytes_and_time_are_bounded(served: tuple[int, list[str]]) -> None:
    address = f"http://127.0.0.1:{served[0]}/a"
    assert len(fetch(address, 99, ["127.0.0.1"])) == 100
    with pytest.raises(RemoteError, match="takes more than 0 s"):
        fetch(address, 10_000, ["127.0.0.1"], whole_s=0)


INNER = ("10.0.0.1", "172.16.3.4", "192.168.1.1", "127.8.8.8", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1")
INNER_6 = ("::1", "fe80::1%eth0", "fc00::1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1", "::")


def test_which_addresses_are_inner() -> None:
    assert all(map(is_inner, (*INNER, *INNER_6, "localhost", "LOCALHOST.")))
    assert not any(map(is_inner, ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "example.com")))
