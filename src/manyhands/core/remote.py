"""A folder in an object store or on another file system, by its URL, through fsspec: s3://, gs://, az://, file://, ...;
and a file at an address that comes from outside.

Stores have no rename and no folders, so whoever writes here puts the file last that says that the others are there.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ANSWER_TIMEOUT_S = 30.0  # without a byte
FETCH_TIMEOUT_S = 120.0  # of a whole file, whatever number of redirects and bytes it takes
NAT64 = ipaddress.ip_network("64:ff9b::/96")


class RemoteError(Exception):
    """The store cannot be read or written; ``str`` says why."""


def fetch(url: str, max_bytes: int, hosts: Collection[str] | None = None, whole_s: float = FETCH_TIMEOUT_S) -> bytes:
    """Up to ``max_bytes`` + 1 bytes of the file at an http(s) address that is not trusted, in at most some ``whole_s``
    seconds. Without ``hosts`` no host of an inner network (loopback, private, link-local) is asked for anything, with
    them no other host; the same holds for redirects. Raises RemoteError.
    """
    end = time.monotonic() + whole_s
    opener = urllib.request.OpenerDirector()
    kinds = (urllib.request.ProxyHandler, urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor)
    handlers = [kind() for kind in (*kinds, urllib.request.HTTPDefaultErrorHandler, urllib.request.UnknownHandler)]
    for handler in (*handlers, _Http(hosts), _Https(hosts)):
        opener.add_handler(handler)
    try:
        parts: list[bytes] = []
        with opener.open(url, timeout=ANSWER_TIMEOUT_S) as answer:
            while max_bytes >= 0 and (part := answer.read1(min(1 << 20, max_bytes + 1))):
                parts.append(part)
                max_bytes -= len(part)
                if time.monotonic() > end:
                    raise RemoteError(f"it takes more than {whole_s:.0f} s")
        return b"".join(parts)
    except urllib.error.URLError as error:
        raise RemoteError(str(error.reason if not isinstance(error, urllib.error.HTTPError) else error)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RemoteError(str(error) or type(error).__name__) from None


def is_inner(address: str) -> bool:
    """Whether an IP address is none of the public internet, however it is written; False for a name."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address.casefold().rstrip(".") == "localhost"
    if isinstance(ip, ipaddress.IPv6Address):
        inside = ip.ipv4_mapped or ip.sixtofour or (ipaddress.ip_address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else None)
        if inside is not None:
            return is_inner(str(inside))
    return not ip.is_global or ip.is_multicast


class _Hosts:
    """Which hosts may be asked: ``allowed``, or the public ones."""

    def __init__(self, allowed: Collection[str] | None) -> None:
        super().__init__()
        self._allowed = None if allowed is None else {host.casefold() for host in allowed}

    def connect(self, kind: type[http.client.HTTPConnection], request: urllib.request.Request) -> Callable[..., Any]:
        """What makes a connection of a ``kind`` for a request. RemoteError for a host that may not be asked; where a
        name leads is known once it is connected, and before it is asked."""
        host = urlsplit(request.full_url).hostname or ""
        if self._allowed is not None:
            if host not in self._allowed:
                raise RemoteError(f"{host} is none of the hosts that may be asked ({', '.join(sorted(self._allowed))})")
            return kind
        if is_inner(host):
            raise RemoteError(_inner(host))
        if request.has_proxy() or getattr(request, "_tunnel_host", None):
            return kind  # the proxy finds the host

        class Checked(kind):  # type: ignore[valid-type,misc]
            def connect(self) -> None:
                super().connect()
                if is_inner(peer := self.sock.getpeername()[0]):
                    self.close()
                    raise RemoteError(_inner(peer))

        return Checked


def _inner(address: str) -> str:
    return f"{address} is an address of this machine or of an inner network"


class _Http(_Hosts, urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self.connect(http.client.HTTPConnection, request), request)


class _Https(_Hosts, urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self.connect(http.client.HTTPSConnection, request), request)


class RemoteFolder:
    """Names are relative, with ``/``. Every method raises RemoteError."""

    def __init__(self, url: str) -> None:
        """RemoteError where the URL's kind needs a package that is not installed."""
        import fsspec

        self.url = url.rstrip("/")
        with _explained(self.url):
            self._fs, path = fsspec.core.url_to_fs(self.url)
        self._path = path.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """The file's content; None where there is no such file."""
        with _explained(self.url), contextlib.suppress(FileNotFoundError):
            return self._fs.cat_file(f"{self._path}/{name}")
        return None

    def list(self, name: str = "") -> list[str]:
        """The last parts of the names in the folder ``name``, sorted; none where there is no such folder."""
        with _explained(self.url), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            found = self._fs.ls(f"{self._path}/{name}".rstrip("/"), detail=False)
            return sorted({path.rstrip("/").rpartition("/")[2] for path in found})
        return []

    def put(self, file: Path, name: str, moved: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Copies a local file there, replacing another; ``moved`` hears of bytes that are."""
        with _explained(self.url):
            self._fs.makedirs(f"{self._path}/{name}".rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(file), f"{self._path}/{name}", callback=_make_callback(moved))

    def get(self, name: str, file: Path, moved: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Copies a file from there."""
        with _explained(self.url):
            self._fs.get_file(f"{self._path}/{name}", str(file), callback=_make_callback(moved))

    def remove(self, name: str, first: str) -> None:
        """Removes the folder ``name``, its file ``first`` before all others, if it is there."""
        with _explained(self.url):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path}/{name}/{first}")
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._path}/{name}", recursive=True)


def _make_callback(moved: Callable[[int], object]) -> Any:
    from fsspec.callbacks import Callback

    class Moved(Callback):
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            moved(inc)

    return Moved()


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, RemoteError):
        raise
    except Exception as error:  # each store has its own
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise RemoteError(f"{url}: {type(error).__name__}: {text}") from error
