"""``manyhands serve``: OpenAI's protocol over the tokens that ``manyhands generate`` gives."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UserError, require_server
from manyhands.infer import serve
from manyhands.infer.decode import Completion
from manyhands.infer.load import Answerer, ModelLocation, open_answerer
from manyhands.infer.replicas import Placement
from manyhands.infer.scheduler import AnswerRequest, Scheduler
from manyhands.infer.serve import _Asked, make_app
from manyhands.infer.settings import GenerationSettings
from manyhands.infer.vllm import lora_rank_limit, server_command
from tests.support.tiny import write_tiny_model

DEFAULTS = GenerationSettings(max_new_tokens=8)
LONG_S = 120.0  # busy machines are slow
QUESTION = [{"role": "user", "content": "alpha beta"}]


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Answerer:
    return open_answerer(write_tiny_model(tmp_path_factory.mktemp("serve") / "base", "llama"))


@pytest.fixture(scope="module")
def client(answerer: Answerer) -> Iterator[Any]:
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    with TestClient(make_app(answerer, "tiny", DEFAULTS), base_url="http://127.0.0.1") as opened:
        yield opened


def ask(client: Any, path: str = "chat/completions", **body: Any) -> Any:
    text = json.dumps(({"messages": QUESTION} if path.startswith("chat") else {}) | body)
    return client.post(f"/v1/{path}", content=text, headers={"content-type": "application/json"})


def events(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_gets_the_answer_of_generate(client: Any, answerer: Answerer) -> None:
    expected = answerer.answer_all([QUESTION], DEFAULTS)[0]
    found = ask(client, model="tiny").json()
    assert found["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    assert found["choices"][0]["finish_reason"] == expected.finish_reason and found["model"] == "tiny"
    assert found["usage"]["completion_tokens"] == len(expected.ids)
    assert found["usage"]["prompt_tokens"] == len(answerer.encode(QUESTION))
    shorter = ask(client, max_completion_tokens=3).json()
    assert shorter["usage"]["completion_tokens"] == 3
    assert ask(client, "completions", prompt="alpha").json()["object"] == "text_completion"


def test_a_stream_is_the_same_text_in_pieces(client: Any, answerer: Answerer) -> None:
    chunks = events(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
    assert "".join(texts) == answerer.answer_all([QUESTION], DEFAULTS)[0].text and sum(map(bool, texts)) > 2
    assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert chunks[-1]["usage"]["completion_tokens"] == 8 and chunks[-1]["choices"] == []


def test_seeds_and_stop_strings_act(client: Any) -> None:
    def text(**body: Any) -> str:
        return ask(client, **body).json()["choices"][0]["message"]["content"]

    assert text(temperature=1.5, seed=1) == text(temperature=1.5, seed=1) != text(temperature=1.5, seed=2)
    assert len({text(temperature=1.5) for _ in range(4)}) > 1  # no seed: anew each time
    plain = text(temperature=0, top_p=0.5)  # greedy, whatever top_p
    assert plain == text() and text(stop=plain[3]) == plain[: plain.index(plain[3])].strip()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "gpt-4"}, 404, "this server has the model tiny"),
        ({"n": 2}, 400, "n has no effect on this server: leave it out, or 1"),
        ({"logprobs": True}, 400, "logprobs has no effect"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format has no effect"),
        ({"mirostat": 1}, 400, "mirostat has no effect"),
        ({"temperature": "hot"}, 400, "temperature must be a number"),
        ({"temperature": -1}, 400, "temperature must be 0 or more"),
        ({"max_tokens": 5000}, 400, "the model has 2048"),
        ({"messages": []}, 400, "a list of messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "has the role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text alone is read"),
        ({"stop": [1]}, 400, "stop must be"),
        ({"tools": "search"}, 400, "tools must be a list"),
        ({"stream_options": "usage"}, 400, "stream_options must be an object"),
        ({"stream": "false"}, 400, "stream must be true or false"),
        ({"prompt": "alpha"}, 400, "prompt has no effect"),
        ({"model": "\ud800"}, 400, "half of a surrogate pair"),
        ({"\ud800": 1}, 400, "half of a surrogate pair"),
        ({"temperature": 10**400}, 400, "temperature is too large"),
        ({"repetition_penalty": 10**400}, 400, "repetition_penalty is too large"),
        ({"max_tokens": 1.5}, 400, "max_tokens must be an integer"),
        ({"seed": 2**63}, 400, "seed must be 0 or more, and below 2**63"),
        ({"top_p": 5}, 400, "top_p must be above 0 and at most 1"),
        ({"top_k": -1, "temperature": 0}, 400, "top_k must be 0 (all tokens) or more"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty must be above 0"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"max_tokens": 8, "max_completion_tokens": 0}, 400, "max_completion_tokens must be at least 1"),
        ({"stop": [""]}, 400, "stop must not be empty"),
    ],
)
def test_what_would_have_no_effect_is_refused(client: Any, body: dict[str, Any], status: int, said: str) -> None:
    response = ask(client, **body)
    assert response.status_code == status
    assert said in response.json()["error"]["message"] and response.json()["error"]["type"] == "invalid_request_error"
    assert ask(client, n=1, user="me", logprobs=False, response_format={"type": "text"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": QUESTION}, "messages has no effect"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools has no effect"),
        ({"prompt": "a\ud800b"}, "half of a surrogate pair"),
    ],
)
def test_what_completions_cannot_take_is_refused(client: Any, body: dict[str, Any], said: str) -> None:
    response = ask(client, "completions", **{"prompt": "alpha"} | body)
    assert response.status_code == 400 and said in response.json()["error"]["message"]


def test_pages_of_the_web_cannot_ask(client: Any) -> None:
    body = json.dumps({"messages": QUESTION})
    assert client.post("/v1/chat/completions", content=body, headers={"content-type": "text/plain"}).status_code == 415
    named = {"content-type": "application/json", "host": "attacker.example"}
    assert client.post("/v1/chat/completions", content=body, headers=named).status_code == 400
    assert (
        client.post("/v1/chat/completions", content="{", headers=named | {"host": "localhost:8000"}).status_code == 400
    )
    assert client.get("/health").json() == {"status": "ok"}
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]


def test_openais_own_client_reads_it(client: Any, answerer: Answerer) -> None:
    openai = pytest.importorskip("openai")
    theirs = openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=client)
    expected = answerer.answer_all([QUESTION], DEFAULTS)[0].text
    answer = theirs.chat.completions.create(model="tiny", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == expected
    stream = theirs.chat.completions.create(model="tiny", messages=QUESTION, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    with pytest.raises(openai.BadRequestError, match="has no effect"):
        theirs.chat.completions.create(model="tiny", messages=QUESTION, n=3)


def test_requests_that_wait_together_share_a_batch(answerer: Answerer) -> None:
    prompts = [tuple(answerer.encode([{"role": "user", "content": text}])) for text in ("a", "b c d", "e", "f g")]
    sampled = GenerationSettings(max_new_tokens=8, temperature=1.0)

    async def ask_all() -> tuple[list[Completion], list[int]]:
        scheduler = Scheduler(answerer)
        requests = [AnswerRequest(ids, DEFAULTS if n < 3 else sampled, n) for n, ids in enumerate(prompts)]
        waiting = [asyncio.ensure_future(scheduler.answer(request)) for request in requests]
        await asyncio.sleep(0)  # all of them are in the queue
        scheduler.start()
        found = await asyncio.gather(*waiting)
        scheduler.stop()
        return list(found), scheduler.batches

    found, batches = asyncio.run(ask_all())
    assert batches == [3, 1]  # other settings, another batch
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b c d", "e")]
    assert found[:3] == answerer.answer_all(conversations, DEFAULTS)


def test_an_answer_that_nobody_waits_for_is_not_finished(answerer: Answerer) -> None:
    """Of a client that has run into its time limit, say: others would wait for it."""
    pytest.importorskip("starlette")
    app = make_app(answerer, "tiny", DEFAULTS)
    body = json.dumps({"messages": QUESTION, "max_tokens": 1900}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
    messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask_and_go() -> None:
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)

    model: Any = answerer.model
    steps: list[int] = []
    hook = model.register_forward_hook(lambda *_: steps.append(1))
    asyncio.run(ask_and_go())
    hook.remove()
    assert sent[0]["status"] == 499 and len(steps) < 1900


def test_what_waits_has_a_bound(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.infer.scheduler.MAX_WAITING", 0)
    assert [ask(client, stream=stream).status_code for stream in (False, True)] == [503, 503]
    monkeypatch.undo()
    assert ask(client).status_code == 200


def test_an_error_of_the_model_ends_the_request_and_not_the_server(
    client: Any, answerer: Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr("manyhands.infer.scheduler.complete", fail)
    assert ask(client).status_code == 500 and "out of something" in ask(client).json()["error"]["message"]
    assert "out of something" in ask(client, stream=True).text
    monkeypatch.undo()
    assert ask(client).status_code == 200


@pytest.fixture
def port(answerer: Answerer) -> Iterator[int]:
    """Of a server in a thread of this process, as ``manyhands serve`` runs it."""
    pytest.importorskip("uvicorn")
    from manyhands.infer.http import make_server

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    server = make_server(make_app(answerer, "tiny", DEFAULTS), number)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield number
    server.should_exit = True
    thread.join(LONG_S)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def head(num_bytes: int) -> bytes:
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    return b"POST /v1/completions HTTP/1.1\r\n" + fields.encode()


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def get_models(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=LONG_S) as answer:
        return [model["id"] for model in json.load(answer)["data"]]


@pytest.mark.parametrize("announced", [True, False])
def test_a_prompt_that_no_context_holds_is_refused_by_its_bytes(
    announced: bool, client: Any, answerer: Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_Asked", lambda *_: pytest.fail("it was read"))
    raw = json.dumps({"prompt": "alpha " * 1_000_000}).encode()
    content = raw if announced else (raw[at : at + 1000] for at in range(0, len(raw), 1000))
    refused = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    model: Any = answerer.model
    limit = model.config.max_position_embeddings * serve.MAX_TOKEN_BYTES + serve.ROOM_BYTES
    assert refused.status_code == 413 and f"longer than {limit:,} bytes" in refused.json()["error"]["message"]
    assert refused.headers["connection"] == "close"


def test_who_tokenizes_long_keeps_nobody_waiting(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun, read = threading.Event(), threading.Event(), serve.parse_body

    def wait_if_long(raw: bytes) -> Any:
        if len(raw) > serve.LONG_BODY_BYTES:
            begun.set()
            assert go_on.wait(LONG_S)
        return read(raw)

    monkeypatch.setattr(serve, "parse_body", wait_if_long)
    raw = json.dumps({"prompt": " " * serve.LONG_BODY_BYTES}).encode()
    with socket.create_connection(("127.0.0.1", port)) as long, socket.create_connection(("127.0.0.1", port)) as short:
        long.sendall(head(len(raw)) + raw)
        assert begun.wait(LONG_S)
        assert get_models(port) == ["tiny"]
        body = b'{"prompt": "alpha", "max_tokens": 2}'
        short.sendall(head(len(body)) + body)
        assert short.recv(12) == b"HTTP/1.1 200"
        go_on.set()
        assert long.recv(8) == b"HTTP/1.1"


@pytest.mark.ci
def test_requests_that_do_not_come_to_their_end_are_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.infer.http.HEAD_S", 0.5)
    monkeypatch.setattr(serve, "BODY_S", 0.5)
    for begin in (b"", b"POST /v1/comp", head(7)[:-2], b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nGET"):
        with socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as connection:
            connection.sendall(begin)
            answer = read_all(connection)
            assert answer == b"" or (begin.endswith(b"GET") and answer.startswith(b"HTTP/1.1 200")), begin
    with socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as connection:
        connection.sendall(head(100) + b'{"prompt":')
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.5 s" in answer
    assert get_models(port) == ["tiny"]


def test_a_client_that_sends_a_byte_now_and_then_is_ended_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.infer.http.HEAD_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nX: ")

        def is_ended() -> bool:
            try:
                connection.sendall(b"x")
            except ConnectionError:
                return True
            time.sleep(0.05)
            return False

        until(is_ended)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sent", [0.2, 1.0])
def test_a_client_that_hangs_up_is_no_error(
    stream: bool, sent: float, port: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Within the head, the body or the answer."""
    body = json.dumps({"prompt": "alpha", "max_tokens": 1000, "stream": stream}).encode()
    for text in (head(len(body))[:40], head(len(body)) + body[: int(sent * len(body))]):
        with socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as connection:
            connection.sendall(text)
            if stream and text.endswith(body):
                assert connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    assert get_models(port) == ["tiny"]
    time.sleep(2 * serve.LOOK_S)
    assert not caplog.records and "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("templated", [False, True])
def test_calls_of_tools_are_read_where_the_format_is_known(answerer: Answerer, templated: bool) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    asked = _Asked(answerer, {"messages": QUESTION, "tools": tools}, "tiny", DEFAULTS, is_chat=True)
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    if templated:  # a tokenizer that brings its own format
        said = said.replace("tool_call>", "call>")
        region = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
        call = {"type": "function", "function": "{content}"}
        fields = {"tool_calls": region | {"transform": call}}
        answerer.tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    try:
        message, reason = asked.message(Completion(tuple(answerer.tokenizer.encode(said)), said, "stop"))
    finally:
        answerer.tokenizer.response_template = None
    assert reason == "tool_calls" and message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    for text in ("no call", "<tool_call>{broken}</tool_call>", "<tool_call>{}</tool_call>"):
        plain = asked.message(Completion(tuple(answerer.tokenizer.encode(text)), text, "stop"))
        assert plain == ({"role": "assistant", "content": text}, "stop")


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.core.errors.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="starlette and uvicorn are not installed") as refused:
        require_server("manyhands serve", "", "serve")
    assert "manyhands[serve]" in refused.value.fix


def test_vllms_server_gets_model_adapter_and_loopback(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 20}))
    found = ModelLocation(tmp_path / "base", tmp_path, "my template", {"enable_thinking": False, "strftime_now": print})
    command = server_command(found, "mine", "127.0.0.1", 8001)
    pairs = dict(itertools.pairwise(command))
    assert pairs["--model"] == str(tmp_path / "base") and pairs["--host"] == "127.0.0.1" and pairs["--port"] == "8001"
    assert pairs["--lora-modules"] == f"mine={tmp_path}" and pairs["--max-lora-rank"] == "32"
    assert pairs["--chat-template"] == "my template"
    assert json.loads(pairs["--allowed-origins"]) == [] and pairs["--middleware"] == "manyhands.infer.http.LocalHosts"
    assert json.loads(pairs["--default-chat-template-kwargs"]) == {"enable_thinking": False}
    assert "--served-model-name" in server_command(ModelLocation(tmp_path), "mine", "127.0.0.1", 8001)
    assert pairs["--generation-config"] == "vllm"  # not the sampling of the model's own file
    assert json.loads(pairs["--override-generation-config"])["temperature"] == 0
    asked = GenerationSettings(max_new_tokens=512, temperature=0.5, top_k=5), Placement(gpus=2, batch_size=3)
    pairs = dict(itertools.pairwise(server_command(found, "mine", "127.0.0.1", 8001, *asked)))
    sampling = json.loads(pairs["--override-generation-config"])
    assert sampling == {"temperature": 0.5, "top_p": 1.0, "top_k": 5, "repetition_penalty": 1.0}
    assert (pairs["--tensor-parallel-size"], pairs["--max-num-seqs"]) == ("2", "3")
    with pytest.raises(UserError, match="--stop has no effect on vLLM's server"):
        server_command(found, "mine", "127.0.0.1", 8001, GenerationSettings(max_new_tokens=512, stop=("x",)))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 600}))
    with pytest.raises(UserError, match="up to rank 512"):
        lora_rank_limit(tmp_path)
