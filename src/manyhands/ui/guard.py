"""Who may ask the page's server: browsers of this machine with the token, no other site through them."""

from __future__ import annotations

import contextlib
import hmac
import json
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
MAX_BODY_BYTES = 64 << 10


class Guard:
    """ASGI: answers what is refused, and gives every answer ``HEADERS``. Plain, as a wrapped stream would not end."""

    def __init__(self, app: Any, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._cookie = f"manyhands-{port}"  # cookies know no ports
        self._origins = {f"http://{host}:{port}" for host in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                fixed = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *fixed]}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["method"] == "GET" and scope["path"] == "/" and given and self._is_token(given):
            cookie = f"{self._cookie}={given}; HttpOnly; SameSite=Strict; Path=/"
            return await _answer(send_guarded, 303, "", {"location": "/", "set-cookie": cookie})
        if refused := self._refuse(scope["method"], headers):
            return await _answer(send_guarded, *refused)
        await self._app(scope, receive, send_guarded)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)

    def _refuse(self, method: str, headers: dict[str, str]) -> tuple[int, str] | None:
        cookies: SimpleCookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            cookies.load(headers.get("cookie", ""))
        given = cookies.get(self._cookie)
        if given is None or not self._is_token(given.value):
            return 401, "Open the address with the token that `manyhands ui` has printed."
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return 403, "Another site has asked for this."
        origin = headers.get("origin")
        if (origin is not None and origin not in self._origins) or (method == "POST" and origin is None):
            return 403, "Another site has asked for this."
        if method == "POST":
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 415, "The content type must be application/json."
            length = headers.get("content-length", "")
            if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
                return 413, f"The body must be at most {MAX_BODY_BYTES} bytes, and its length be given."
        return None


async def _answer(send: Any, status: int, text: str, headers: dict[str, str] | None = None) -> None:
    """``text`` as JSON, which the page shows, and as text for who opens it by hand."""
    body = json.dumps({"error": text}).encode() if text else b""
    kind = {"content-type": "application/json", "content-length": str(len(body))}
    fields = [(name.encode(), value.encode()) for name, value in {**kind, **(headers or {})}.items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
