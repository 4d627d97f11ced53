"""The server of ``manyhands ui``: Starlette on the loopback address, one static page, server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from manyhands.core.errors import UserError
from manyhands.launch.nodes.address import LOCAL_HOST
from manyhands.ui.follow import Axis
from manyhands.ui.guard import Guard
from manyhands.ui.runs import Run, Runs, clean

STATIC = Path(__file__).with_name("static")
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
LOOK_S, COMMENT_S = 1.0, 15.0
MAX_COMPARED = 12


def refuse_missing_packages() -> None:
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            where="manyhands ui",
            why="the page is served by these packages",
            fix="pip install 'manyhands[ui]'",
        )


def serve_page(folder: Path, port: int, report: Callable[[str], None] = print) -> None:
    """Serves until it is interrupted. The address with its token is ``report``-ed once the port is open."""
    refuse_missing_packages()
    from manyhands.infer.http import make_server

    token = secrets.token_urlsafe(24)
    page = Page(folder)
    server = make_server(page.make_app(token, port), port)
    page.is_ending = lambda: server.should_exit
    report(f"runs of {folder}/: http://{LOCAL_HOST}:{port}/?token={token} (Ctrl-C to stop)")
    server.run()


class Page:
    """The application. One look at the runs serves all who watch, and nobody looks while nobody watches."""

    def __init__(self, folder: Path) -> None:
        self.runs = Runs(folder)
        self.is_ending: Callable[[], bool] = lambda: False
        self._looking = asyncio.Lock()
        self._looked = -LOOK_S

    def make_app(self, token: str, port: int) -> Any:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.routing import Route

        from manyhands.infer.http import LocalHosts

        routes = [Route(path, self._static(file)) for path, file in _static_files().items()]
        routes += [
            Route("/api/events", self._events),
            Route("/api/runs/{name}", self._of_run(self._describe)),
            Route("/api/compare", self._compare),
        ]
        return Starlette(routes=routes, middleware=[Middleware(LocalHosts), Middleware(Guard, token=token, port=port)])

    @staticmethod
    def _static(file: Path) -> Callable[[Any], Awaitable[Any]]:
        from starlette.responses import Response

        body = file.read_bytes()

        async def answer(_: Any) -> Any:
            return Response(body, media_type=KINDS[file.suffix])

        return answer

    async def look(self) -> int:
        """The runs as of now: a look is at most ``LOOK_S`` old."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked >= 0.9 * LOOK_S:
                self._looked = now
                await asyncio.to_thread(self.runs.look)
        return self.runs.version

    async def _events(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        async def stream() -> AsyncIterator[str]:
            version, quiet_s = -1, 0.0
            while not self.is_ending() and not await request.is_disconnected():
                now = await self.look()
                if now != version:
                    yield f"event: runs\ndata: {_dump(self.runs.since(version))}\n\n"
                    version, quiet_s = now, 0.0
                elif quiet_s >= COMMENT_S:
                    yield ": \n\n"
                    quiet_s = 0.0
                await asyncio.sleep(LOOK_S)
                quiet_s += LOOK_S

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _of_run(self, answer: Callable[[Any, Run], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def answer_of_run(request: Any) -> Any:
            await self.look()
            run = self.runs.get(request.path_params["name"])
            return _respond({"error": "there is no such run"}, 404) if run is None else await answer(request, run)

        return answer_of_run

    async def _describe(self, request: Any, run: Run) -> Any:
        return _respond(await asyncio.to_thread(run.describe, _axis(request)))

    async def _compare(self, request: Any) -> Any:
        await self.look()
        names = request.query_params.getlist("run")[:MAX_COMPARED]
        return _respond(await asyncio.to_thread(self.runs.compare, names, _axis(request)))


def _axis(request: Any) -> Axis:
    axis = request.query_params.get("axis", "step")
    return axis if axis in get_args(Axis) else "step"


def _static_files() -> dict[str, Path]:
    """By their address: whatever else is asked for is not there."""
    files = {f"/static/{file.name}": file for file in STATIC.iterdir() if file.suffix in KINDS}
    return {**files, "/": STATIC / "index.html"}


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _respond(value: Any, status: int = 200) -> Any:
    from starlette.responses import Response

    return Response(_dump(clean(value)), status, media_type="application/json")
