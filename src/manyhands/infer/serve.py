"""``manyhands serve``: an OpenAI-compatible endpoint on this machine's loopback address.

With vLLM installed it is vLLM's own server. Otherwise a small one on Starlette and uvicorn: requests that wait together
are answered in one batch, with the tokens that ``manyhands generate`` gives. A field of a request that would have no
effect is refused, not ignored.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import os
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError, require_server
from manyhands.data.read.messages import RowRefused
from manyhands.data.read.text_files import is_encodable
from manyhands.infer.decode import Completion
from manyhands.infer.load import Answerer, find_parts
from manyhands.infer.prompts import read_messages
from manyhands.infer.replicas import ALL_GPUS, Placement
from manyhands.infer.scheduler import MAX_WAITING, AnswerRequest, Scheduler
from manyhands.infer.settings import SERVED, GenerationSettings
from manyhands.launch.nodes.address import LOCAL_HOST

MAX_BODY_BYTES = 16 << 20
# A token of text is seldom longer than 16 bytes, in JSON up to twice that; runs of one character may be.
MAX_TOKEN_BYTES = 32
ROOM_BYTES = 64 << 10  # for what is no prompt: tools, names of fields
LONG_BODY_BYTES = 64 << 10  # such a request is tokenized where it keeps no shorter one waiting
MAX_LONG = 16  # of those, that are waiting
BODY_S = 60.0  # for a whole request to arrive
LOOK_S = 0.5  # between looks whether the client still waits for its answer
CLIENT_GONE = 499  # nginx's number; nobody reads it
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
# Fields of the protocol that act, by the name of the setting that they are.
SETTINGS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
}
ACTING = {"model", "stream", "stream_options", "stop", *SETTINGS}
ACTING_IN_CHAT, ACTING_IN_COMPLETIONS = ACTING | {"messages", "tools"}, ACTING | {"prompt"}
# Fields that may be there with the one value that changes nothing; ``user`` and ``metadata`` are for the log of whoever
# serves, of which there is none.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "store": (False,),
}
UNREAD = {"user", "metadata", "service_tier"}


class BadRequest(Exception):
    """What is wrong with a request; ``field`` of its body."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


def serve(
    folder: Path,
    *,
    base: str | None = None,
    port: int = 8000,
    name: str | None = None,
    engine: str = "auto",
    settings: GenerationSettings | None = None,
    placement: Placement = ALL_GPUS,
) -> int:
    """Serves until interrupted. ``engine`` auto is vLLM where installed. UserError for a missing library."""
    found, name = find_parts(folder, base), name or folder.resolve().name
    if engine == "vllm" or (engine == "auto" and find_spec("vllm") is not None):
        from manyhands.infer.vllm import refuse_adapter, refuse_missing_vllm, server_command

        refuse_missing_vllm()
        refuse_adapter(found)
        command = server_command(found, name, LOCAL_HOST, port, settings or SERVED, placement)
        print(f"vLLM: {' '.join(command)}", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *command])
    require_server(
        "manyhands serve", "the endpoint is made with these packages, or by vLLM where that is installed", "serve"
    )
    from manyhands.infer.batch import open_placed
    from manyhands.infer.http import make_server

    answerer = open_placed(folder, base, placement)
    app = make_app(answerer, name, settings or SERVED, placement.batch_size)
    print(f"{name}: http://{LOCAL_HOST}:{port}/v1 (Ctrl-C to stop)", file=sys.stderr, flush=True)
    make_server(app, port).run()
    return 0


def make_app(answerer: Answerer, name: str, defaults: GenerationSettings, max_rows: int | None = None) -> Any:
    """The ASGI application; its scheduler's thread runs while the application does."""
    from contextlib import asynccontextmanager

    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    from manyhands.infer.http import LocalHosts

    scheduler, readers = Scheduler(answerer, max_rows), Readers(answerer)
    created = int(time.time())

    @asynccontextmanager
    async def run_scheduler(_: Any) -> AsyncIterator[None]:
        scheduler.start()
        try:
            yield
        finally:
            readers.close()
            scheduler.stop()

    async def answer(request: Request) -> Any:
        is_chat = request.url.path.endswith("/chat/completions")
        try:
            raw = await _read_body(request, readers.max_bytes)
            asked = await readers.read(raw, lambda reader: _Asked(reader, parse_body(raw), name, defaults, is_chat))
        except BadRequest as error:
            # What is left of a request that was not read whole is not to be taken for the next one.
            headers = {"connection": "close"} if error.status in (408, 413) else None
            return JSONResponse(_error(str(error), error.field), error.status, headers)
        except ClientDisconnect:
            return JSONResponse(_error("the client has gone"), CLIENT_GONE)
        if scheduler.is_full:
            return JSONResponse(_error("too many requests are waiting: try again later", kind="server_error"), 503)
        if asked.streams:
            return StreamingResponse(_stream(scheduler, asked), media_type="text/event-stream")
        return JSONResponse(*await _answer_whole(scheduler, asked, request))

    async def models(_: Request) -> Any:
        model = {"id": name, "object": "model", "created": created, "owned_by": "manyhands"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: Request) -> Any:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", answer, methods=["POST"]),
            Route("/v1/completions", answer, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ],
        middleware=[Middleware(LocalHosts)],
        lifespan=run_scheduler,
    )


class Readers:
    """Threads that tokenize requests: one for ordinary ones, one with its own tokenizer for long ones."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerers = answerer, dataclasses.replace(answerer, tokenizer=copy.deepcopy(answerer.tokenizer))
        self._threads = [ThreadPoolExecutor(1, f"requests-{kind}") for kind in ("short", "long")]
        self._num_waiting = [0, 0]
        self.max_bytes = MAX_BODY_BYTES
        if answerer.num_positions is not None:
            self.max_bytes = min(MAX_BODY_BYTES, answerer.num_positions * MAX_TOKEN_BYTES + ROOM_BYTES)

    async def read(self, raw: bytes, read: Callable[[Answerer], _Asked]) -> _Asked:
        """Raises BadRequest, also where too many are waiting."""
        kind = int(len(raw) > LONG_BODY_BYTES)
        if self._num_waiting[kind] >= (MAX_WAITING, MAX_LONG)[kind]:
            raise BadRequest("too many requests are waiting: try again later", status=503)
        self._num_waiting[kind] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[kind], read, self._answerers[kind])
        finally:
            self._num_waiting[kind] -= 1

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


async def _read_body(request: Any, max_bytes: int) -> bytes:
    """BadRequest for a body longer than any prompt, before it is read, and for one that does not arrive in time."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise BadRequest("the content type must be application/json", status=415)
    too_long = BadRequest(f"the request is longer than {max_bytes:,} bytes: no prompt of this model is", status=413)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_long
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                raw += part
                if len(raw) > max_bytes:
                    raise too_long
    except TimeoutError:
        raise BadRequest(f"the request did not arrive within {BODY_S:g} s", status=408) from None
    return bytes(raw)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The object in a request's body. Raises BadRequest."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    if not is_encodable(body):  # neither a tokenizer nor an answer that names it could take it
        raise BadRequest("the body holds half of a surrogate pair: not a character")
    return body


class _Asked:
    """A parsed request: its prompts, and the form of its response."""

    def __init__(
        self, answerer: Answerer, body: Mapping[str, Any], name: str, defaults: GenerationSettings, is_chat: bool
    ) -> None:
        given = {key: value for key, value in body.items() if value is not None}
        check_fields(given, ACTING_IN_CHAT if is_chat else ACTING_IN_COMPLETIONS)
        if given.get("model", name) != name:
            raise BadRequest(f"this server has the model {name}, not {given['model']}", "model", 404)
        self.is_chat, self.streams = is_chat, _read(given, "stream", bool)
        self.with_usage = bool(_read(given, "stream_options", dict).get("include_usage"))
        self._id, self._created = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}", int(time.time())
        self._name, self._answerer = name, answerer
        self.tools = _read(given, "tools", list)
        try:
            ids = self._encode(given)
            settings, number = read_settings(given, defaults)
        except UserError as error:
            raise name_field(error, given) from None
        except RowRefused as error:
            raise BadRequest(str(error)) from None
        positions = answerer.num_positions
        if positions is not None and len(ids) + settings.max_new_tokens > positions:
            room = positions - len(ids)
            if "max_tokens" in given or "max_completion_tokens" in given or room < 1:
                raise BadRequest(f"{len(ids)} tokens and {settings.max_new_tokens} new ones; the model has {positions}")
            settings = GenerationSettings.from_json({**settings.to_json(), "max_new_tokens": room})
        self.request = AnswerRequest(tuple(ids), settings, number)

    def _encode(self, given: Mapping[str, Any]) -> list[int]:
        if self.is_chat:
            if "messages" not in given:
                raise BadRequest("messages are missing", "messages")
            return self._answerer.encode(read_messages(given["messages"], "messages", images=False), self.tools)
        prompt = given.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise BadRequest("prompt must be one text", "prompt")
        return list(self._answerer.tokenizer.encode(prompt))

    def message(self, completion: Completion) -> tuple[dict[str, Any], str]:
        """The assistant's message and its finish reason; calls of tools where the model's format is known."""
        found = read_calls(self._answerer.tokenizer, completion, self.request.ids) if self.tools else []
        if found:
            calls = [{"id": f"call_{n}", "type": "function", "function": call} for n, call in enumerate(found)]
            return {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
        return {"role": "assistant", "content": completion.text}, completion.finish_reason

    def body(self, completion: Completion) -> dict[str, Any]:
        message, reason = self.message(completion)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"message": message} if self.is_chat else {"text": completion.text}
        return self.write([choice], completion)

    def chunk(self, delta: Mapping[str, Any] | str, reason: str | None = None) -> dict[str, Any]:
        """One piece of a streamed answer: a text, or what a message gets besides."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.is_chat:
            choice["delta"] = {"content": delta} if isinstance(delta, str) else dict(delta)
        else:
            choice["text"] = delta if isinstance(delta, str) else ""
        return self.write([choice], is_chunk=True)

    def write(self, choices: list[Any], answer: Completion | None = None, *, is_chunk: bool = False) -> dict[str, Any]:
        """What every answer and chunk has; with the usage of ``answer``."""
        kind = "text_completion" if not self.is_chat else "chat.completion.chunk" if is_chunk else "chat.completion"
        body = {"id": self._id, "object": kind, "created": self._created, "model": self._name, "choices": choices}
        if answer is None:
            return body
        prompt, new = len(self.request.ids), len(answer.ids)
        return body | {"usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}}


KINDS = {list: "a list", dict: "an object", bool: "true or false"}


def _read(given: Mapping[str, Any], key: str, kind: type) -> Any:
    """A list, an object or a boolean of a request; empty or false where it is left out."""
    value = given.get(key, kind())
    if not isinstance(value, kind):
        raise BadRequest(f"{key} must be {KINDS[kind]}", key)
    return value


def read_calls(tokenizer: Any, completion: Completion, prompt_ids: Sequence[int]) -> list[dict[str, str]]:
    """Calls in an answer: by the tokenizer's ``response_template``, else as Hermes and Qwen. None: it is a text."""
    if getattr(tokenizer, "response_template", None):
        parsed = tokenizer.parse_response(list(completion.ids), prefix=list(prompt_ids))
        found = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
    else:
        try:
            found = [json.loads(text) for text in TOOL_CALL.findall(completion.text)]
        except ValueError:
            return []
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in found):
        return []
    given = [(call["name"], call.get("arguments", {})) for call in found]
    return [
        {"name": name, "arguments": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
        for name, value in given
    ]


def check_fields(given: Mapping[str, Any], acting: Collection[str]) -> None:
    """BadRequest for a field that would have no effect here; ``acting``: those that the endpoint reads."""
    for key, value in given.items():
        if key in acting or key in UNREAD or value in HARMLESS.get(key, ()):
            continue
        fix = f"leave it out, or {HARMLESS[key][0]!r}" if key in HARMLESS else "leave it out"
        raise BadRequest(f"{key} has no effect on this server: {fix}", key)


def read_settings(given: Mapping[str, Any], defaults: GenerationSettings) -> tuple[GenerationSettings, int]:
    """A request's settings over the server's, and its seed: unless named a new one, so that requests share a batch."""
    values = defaults.to_json()
    for key, setting in SETTINGS.items():
        if key in given:
            is_real = key in ("temperature", "top_p", "repetition_penalty")
            if not isinstance(given[key], float | int if is_real else int) or isinstance(given[key], bool):
                raise BadRequest(f"{key} must be {'a number' if is_real else 'an integer'}", key)
            if is_real and abs(given[key]) > sys.float_info.max:  # JSON has integers that no float reaches
                raise BadRequest(f"{key} is too large", key)
            values[setting] = given[key]
    if "stop" in given:
        stop = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
            raise BadRequest("stop must be a text or a list of texts", "stop")
        values["stop"] = tuple(stop)
    if values["temperature"] == 0:  # greedy, as the protocol has it: clients send top_p along
        GenerationSettings.from_json(values | {"temperature": 1.0})  # checks top_p and top_k, too
        values |= {"top_p": 1.0, "top_k": 0}
    return GenerationSettings.from_json(values), 0 if "seed" in given else secrets.randbits(62)


def name_field(error: UserError, given: Mapping[str, Any]) -> BadRequest:
    """The error with the field of the request in place of the option that it names."""
    if not error.where.startswith("--"):
        return BadRequest(error.what)
    option = error.where.removeprefix("--")
    setting = option.replace("-", "_")
    fields = {setting: key for key, setting in SETTINGS.items() if key in given}
    field = fields.get(setting, setting)
    return BadRequest(error.what.replace(option, field), field)


async def _answer_whole(scheduler: Scheduler, asked: _Asked, http: Any) -> tuple[dict[str, Any], int]:
    """The body and the status; the answer is given up where the client has gone."""
    answering = asyncio.ensure_future(scheduler.answer(asked.request))
    while not (await asyncio.wait({answering}, timeout=LOOK_S))[0]:
        if await http.is_disconnected():
            asked.request.abandoned = True
            answering.cancel()
            return _error("the client has gone"), CLIENT_GONE
    try:
        return asked.body(answering.result()), 200
    except Exception as error:  # of the model: this request fails, the server keeps running
        return _error(f"{type(error).__name__}: {error}", kind="server_error"), 500


async def _stream(scheduler: Scheduler, asked: _Asked) -> AsyncIterator[str]:
    """Server-sent events: the text as it is made; calls of tools once they are whole."""
    pieces: asyncio.Queue[str | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    request = asked.request
    if not asked.tools:
        request.on_text = lambda text: loop.call_soon_threadsafe(pieces.put_nowait, text)
    task = asyncio.ensure_future(scheduler.answer(request))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        if asked.is_chat:
            yield _event(asked.chunk({"role": "assistant", "content": ""}))
        while (piece := await pieces.get()) is not None:
            yield _event(asked.chunk(piece))
        completion = task.result()
        message, reason = asked.message(completion)
        if asked.tools:
            calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
            yield _event(asked.chunk({"tool_calls": calls} if calls else completion.text))
        yield _event(asked.chunk({}, reason))
        if asked.with_usage:
            yield _event(asked.write([], completion, is_chunk=True))
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(_error(f"{type(error).__name__}: {error}", kind="server_error"))
    finally:
        request.abandoned = True  # of a client that has gone
        task.cancel()


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _error(message: str, field: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}
