"""What the server demands of a connection: a host of this machine, a request in time. Used by vLLM's, too."""

import asyncio
from typing import Any

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from manyhands.launch.nodes.address import LOCAL_HOST

HEAD_S = 10.0  # for the head of a request, from the beginning of the connection or of the request


class LocalHosts(TrustedHostMiddleware):
    """A page of the web cannot reach the server under a name of its own."""

    def __init__(self, app: Any) -> None:
        super().__init__(app, allowed_hosts=[LOCAL_HOST, "localhost"])


class PromptProtocol(H11Protocol):
    """Closes a connection whose request does not begin in time, which uvicorn would keep open."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_S, self._close_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_late(self) -> None:
        self._head_timer = None
        self.transport.close()


def make_server(app: Any, port: int) -> uvicorn.Server:
    """Not started. Its h11 bounds the head of a request to 64 KiB."""
    return uvicorn.Server(
        uvicorn.Config(app, host=LOCAL_HOST, port=port, log_level="warning", http=PromptProtocol, ws="none")
    )
