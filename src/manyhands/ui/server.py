"""The server of ``manyhands ui``: Starlette on the loopback address, one static page, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

from manyhands.core.errors import UserError, require_server
from manyhands.launch.diagnose.hang import examine
from manyhands.launch.nodes.address import LOCAL_HOST
from manyhands.ui.commands import Asker, describe_candidates, words_of
from manyhands.ui.follow import Axis, to_number
from manyhands.ui.guard import Guard
from manyhands.ui.queue import Queue, stop, words_to_resume
from manyhands.ui.queue import describe as describe_queue
from manyhands.ui.runs import Run, Runs, clean, mark_of, read_log

STATIC = Path(__file__).with_name("static")
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
LOOK_S, COMMENT_S, LOGS_S = 1.0, 15.0, 10.0
CHECK_S = 60.0  # that a run is checked before it is queued
MAX_COMPARED, MAX_SAMPLES = 12, 50


def serve_page(folder: Path, port: int, report: Callable[[str], None] = print) -> None:
    """Serves until it is interrupted. The address with its token is ``report``-ed once the port is open."""
    require_server("manyhands ui", "the page is served by these packages", "ui")
    from manyhands.infer.http import make_server

    token = secrets.token_urlsafe(24)
    page = Page(folder)
    page.queue.start_runner()
    server = make_server(page.make_app(token, port), port)
    page.is_ending = lambda: server.should_exit
    report(f"runs of {folder}/: http://{LOCAL_HOST}:{port}/?token={token} (Ctrl-C to stop)")
    server.run()


class Page:
    """The application. One look at the runs serves all who watch, and nobody looks while nobody watches."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.queue, self._asker = Runs(folder), Queue(folder), Asker()
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
            Route("/api/runs/{name}/{action}", self._of_run(self._act), methods=["POST"]),
            Route("/api/compare", self._compare),
            Route("/api/plan", self._post(self._plan), methods=["POST"]),
            Route("/api/data", self._post(self._data), methods=["POST"]),
            Route("/api/queue", self._post(self._change_queue), methods=["POST"]),
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
            queued: tuple[Any, ...] = ()
            while not self.is_ending() and not await request.is_disconnected():
                now = await self.look()
                mark = mark_of(self.queue.file), int(self._looked / LOGS_S)
                if mark != queued:
                    yield f"event: queue\ndata: {_dump(clean(describe_queue(self.queue, read_log)))}\n\n"
                    queued = mark
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

    async def _act(self, request: Any, run: Run) -> Any:
        """Stops or resumes a run, or looks at what it waits for."""
        action, folder = request.path_params["action"], run.folder
        if action == "stop":
            return await _carry_out(lambda: stop(folder))
        if action == "resume":
            return await _carry_out(lambda: self.queue.add(words_to_resume(folder), f"resume {folder.path.name}"))
        if action == "examine":
            return await _carry_out(lambda: list(examine(folder).lines))
        return _respond({"error": "there is no such action"}, 404)

    @staticmethod
    def _post(answer: Callable[[dict[str, Any]], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """Answers with what becomes of the object in the body, or what is wrong with it."""

        async def answer_post(request: Any) -> Any:
            try:
                form = json.loads(await request.body())
                if not isinstance(form, dict):
                    raise ValueError("it is no object")
                return _respond(await answer(form) or {})
            except UserError as error:
                return _respond({"error": str(error)}, 400)
            except (ValueError, KeyError, TypeError) as error:
                return _respond({"error": f"the request is not one of this page: {error}"}, 400)

        return answer_post

    async def _plan(self, form: dict[str, Any]) -> Any:
        price = to_number(form.pop("price", None))
        text = await self._asker.ask(["plan", *words_of(form), "--json"])
        return await asyncio.to_thread(describe_candidates, text, price)

    async def _data(self, form: dict[str, Any]) -> Any:
        """Of a run's configuration (``of``: its name), or of what a form says."""
        step, rows, name = int(form.pop("step", 1)), min(int(form.pop("rows", 6)), MAX_SAMPLES), form.pop("of", None)
        run = self.runs.get(str(name)) if name else None
        words = [str(run.folder.run_json)] if run is not None else words_of(form)
        return json.loads(await self._asker.ask(["data", *words, f"--rows={rows}", f"--step={step}", "--json"]))

    async def _change_queue(self, form: dict[str, Any]) -> Any:
        action, name = form.pop("action"), str(form.pop("name", "")).strip()
        if action == "add":
            await self._check(form)
            words = ["train", *words_of(form), f"output.dir={self.queue.folder}", *([f"name={name}"] if name else [])]
            title = name or str(form.get("run") or form.get("model") or "a run")
            number = await asyncio.to_thread(self.queue.add, [*words, "--fresh"], title)
            return {"id": number}
        if action == "remove":
            return await asyncio.to_thread(self.queue.remove, int(form["id"]))
        if action == "pause":
            return await asyncio.to_thread(self.queue.pause, bool(form["paused"]))
        raise UserError("there is no such action", where=str(action))

    async def _check(self, form: dict[str, Any]) -> None:
        """UserError for a model, keys or rows that a run would refuse. Not for what takes over ``CHECK_S``, nor for a
        run that does not fit: a GPU may be in use now that is free when the run starts.
        """
        asked = {name: value for name, value in form.items() if name != "gpus"}
        with contextlib.suppress(TimeoutError):
            words = ["data", *words_of(asked), "--rows=0", "--json"]
            found = json.loads(await asyncio.wait_for(self._asker.ask(words), CHECK_S))
            for one in found["refused"]:
                raise UserError("\n".join(one["errors"]).removeprefix("error: "))

    async def _compare(self, request: Any) -> Any:
        await self.look()
        names = request.query_params.getlist("run")[:MAX_COMPARED]
        return _respond(await asyncio.to_thread(self.runs.compare, names, _axis(request)))


async def _carry_out(act: Callable[[], Any]) -> Any:
    try:
        return _respond({"done": await asyncio.to_thread(act)})
    except UserError as error:
        return _respond({"error": str(error)}, 400)


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
