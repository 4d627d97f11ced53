"""The page's server: who is let in, and what it says of runs. No browser."""

import asyncio
import json
import os

import pytest

from manyhands.ui.commands import Asker
from manyhands.ui.runs import Runs
from tests.ui.conftest import PORT, TOKEN, step_row, write_run

pytest.importorskip("starlette")
HOST = {"host": f"127.0.0.1:{PORT}"}
COOKIE = {**HOST, "cookie": f"manyhands-{PORT}={TOKEN}"}
POST = {**COOKIE, "origin": f"http://127.0.0.1:{PORT}", "content-type": "application/json", "content-length": "2"}


def request(app, path, headers, method="GET", body=b"{}"):
    """(status, headers, body) of one answer of the ASGI application."""
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    scope["headers"] = [(name.encode(), value.encode("utf-8")) for name, value in headers.items()]
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", PORT), "root_path": ""}
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], fields, b"".join(message.get("body", b"") for message in sent[1:])


def make_app(folder):
    from manyhands.ui.server import Page

    return Page(folder).make_app(TOKEN, PORT)


@pytest.mark.parametrize(
    ("path", "headers", "method", "status"),
    [
        ("/", {"host": "evil.com"}, "GET", 400),
        ("/", HOST, "GET", 401),
        ("/?token=wrong", HOST, "GET", 401),
        ("/?token=%C3%A9", HOST, "GET", 401),
        (f"/?token={TOKEN}", HOST, "GET", 303),
        ("/", {**HOST, "cookie": "manyhands-1=" + TOKEN}, "GET", 401),
        ("/", {**HOST, "cookie": f"manyhands-{PORT}=é"}, "GET", 401),
        ("/", COOKIE, "GET", 200),
        ("/static/app.js", COOKIE, "GET", 200),
        ("/", {**COOKIE, "origin": "http://evil.com"}, "GET", 403),
        ("/", {**COOKIE, "origin": "null"}, "GET", 403),
        ("/", {**COOKIE, "origin": "http://127.0.0.1:1"}, "GET", 403),
        ("/", {**COOKIE, "sec-fetch-site": "cross-site"}, "GET", 403),
        ("/static/../server.py", COOKIE, "GET", 404),
        ("/static/..%2fserver.py", COOKIE, "GET", 404),
        ("/api/runs/..", COOKIE, "GET", 404),
        ("/api/runs/none", COOKIE, "GET", 404),
        ("/api/runs/\x00", COOKIE, "GET", 404),
        ("/api/runs/none", {**POST, "origin": "http://evil.com"}, "POST", 403),
        ("/api/runs/none", {key: value for key, value in POST.items() if key != "origin"}, "POST", 403),
        ("/api/runs/none", {**POST, "content-type": "text/plain"}, "POST", 415),
        ("/api/runs/none", {**POST, "content-length": "1000000"}, "POST", 413),
    ],
)
def test_guard(runs, path, headers, method, status):
    assert request(make_app(runs), path, headers, method)[0] == status


def test_every_answer_carries_the_policy(runs):
    for headers in (HOST, COOKIE):
        _, fields, _ = request(make_app(runs), "/", headers)
        assert fields["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert fields["referrer-policy"] == "no-referrer"
    _, fields, _ = request(make_app(runs), f"/?token={TOKEN}", HOST)
    assert "HttpOnly; SameSite=Strict" in fields["set-cookie"]


def test_a_run_in_full(runs):
    write_run(runs, "one", state="failed", reason="lost at \u202esteps 41")
    _, _, body = request(make_app(runs), "/api/runs/one", COOKIE)
    found = json.loads(body)
    assert found["run"]["reason"] == "lost at \\u202esteps 41", "bidi controls are replaced"
    assert (found["run"]["best"], found["run"]["best_step"], found["run"]["step"]) == (pytest.approx(2 / 30), 30, 30)
    assert found["messages"] == ["the plan", "red message"]
    assert found["ranks"][1]["peak"] == 2.5e9
    assert found["samples"][-1]["answer"] == "Because of step 30."
    assert found["settings"]["method.rank"] == 8


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.jsonl", '{"kind": "step", "step": 31, "devices": 3, "rank_losses": "ab", "rank_seconds": 5}\n'),
        ("metrics.jsonl", '{"kind": "evaluation", "step": 31, "loss": 1, "samples": 5}\n'),
        ("metrics.jsonl", '{"kind": "evaluation", "step": 31, "loss": 1, "samples": [{"answer": NaN}]}\n'),
        ("plans/001.json", '{"memory": {"terms": [1], "limit": NaN}, "layout": {"mesh": "ab"}}'),
    ],
)
def test_damaged_files_of_a_run_spoil_no_answer(runs, file, text):
    (write_run(runs, "one") / file).write_text(text)
    app = make_app(runs)
    assert request(app, "/api/runs/one", COOKIE)[0] == 200
    assert request(app, "/api/compare?run=one", COOKIE)[0] == 200


def test_names_that_are_no_text(runs):
    write_run(runs, "one")
    os.mkdir(os.path.join(os.fsencode(runs), b"\xff"))
    (runs / os.fsdecode(b"\xff") / "run.json").write_text("{}")
    looked = Runs(runs)
    looked.look()
    assert json.dumps(looked.since(0)).encode()


def test_changes_reach_the_list(runs):
    first = write_run(runs, "one", state="running", pid=os.getpid())
    write_run(runs, "two")
    looked = Runs(runs)
    version = looked.look(100.0)
    assert {run["name"]: run["state"] for run in looked.since(0)["runs"]} == {"one": "running", "two": "finished"}
    assert looked.look(101.0) == version, "nothing has changed"
    with (first / "metrics.jsonl").open("a") as rows:
        rows.write(step_row(31))
    looked.look(102.0)
    assert [(run["name"], run["step"]) for run in looked.since(version)["runs"]] == [("one", 31)]
    write_run(runs, "three")
    looked.look(110.0)
    assert len(looked.since(0)["names"]) == 3


def test_a_run_whose_launcher_is_gone_was_killed(runs):
    from manyhands.launch.local.heartbeat import this_host

    write_run(runs, "one", state="running", pid=2**22 + 1, host=this_host())
    looked = Runs(runs)
    looked.look()
    assert looked.since(0)["runs"][0]["state"] == "killed"


def test_comparison_has_differing_keys_only(runs):
    write_run(runs, "one")
    write_run(runs, "two", rate=3e-4)
    _, _, body = request(make_app(runs), "/api/compare?run=one&run=two&axis=tokens", COOKIE)
    found = json.loads(body)
    assert found["differences"] == [{"key": "optimizer.learning_rate", "values": ["0.001", "0.0003"]}]
    assert found["runs"][0]["charts"]["x"][-1] == 30 * 850


def post(app, path, value):
    body = json.dumps(value).encode()
    status, _, answer = request(app, path, {**POST, "content-length": str(len(body))}, "POST", body)
    return status, json.loads(answer)


def test_forms_fill_the_queue(runs, monkeypatch):
    from manyhands.ui.queue import Queue

    async def ask(self, words):
        asked.append(words)
        return json.dumps({"refused": [{"errors": ["error: 1 row cannot be trained"]}] * ("--data=bad" in words)})

    asked = []
    monkeypatch.setattr(Asker, "ask", ask)
    monkeypatch.setattr(Queue, "start_runner", lambda self: None)
    app = make_app(runs)
    form = {"action": "add", "model": "a/b", "data": "x", "name": "new"}
    refused = post(app, "/api/queue", form | {"data": "bad", "gpus": "2"})
    assert refused == (400, {"error": "error: 1 row cannot be trained"})
    assert asked == [["data", "--model=a/b", "--data=bad", "--rows=0", "--json"]] and not Queue(runs).read()["items"]
    assert post(app, "/api/queue", form) == (200, {"id": 1})
    write_run(runs, "one", state="interrupted")
    assert post(app, "/api/runs/one/resume", {})[0] == 200
    words = [item["words"] for item in Queue(runs).read()["items"]]
    assert words[0] == ["train", "--model=a/b", "--data=x", f"output.dir={runs}", "name=new", "--fresh"]
    assert words[1] == ["train", f"{runs}/one/run.json", f"output.dir={runs}"]
    assert post(app, "/api/queue", {"action": "remove", "id": 1})[0] == 200
    assert len(Queue(runs).read()["items"]) == 1


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        ("/api/queue", {"action": "fly"}, "no such action"),
        ("/api/queue", {}, "not one of this page"),
        ("/api/queue", ["add"], "not one of this page"),
        ("/api/queue", {"action": "add", "output": "/etc"}, "no such field: output"),
        ("/api/plan", {"model": "x", "trust": 1}, "no such field: trust"),
        ("/api/data", {"run": "--help"}, "must be a path"),
        ("/api/runs/one/stop", {}, "no launcher of this run"),
        ("/api/runs/one/delete", {}, "no such action"),
        ("/api/runs/moved/resume", {}, "rename it to before"),
        ("/api/runs/damaged/resume", {}, "run.json is damaged"),
    ],
)
def test_refused_forms(runs, path, value, error):
    write_run(runs, "one")
    write_run(runs, "before").rename(runs / "moved")
    (write_run(runs, "damaged") / "run.json").write_text('{"name": ')
    status, answer = post(make_app(runs), path, value)
    assert status >= 400
    assert error in answer["error"]


@pytest.mark.parametrize(("path", "more"), [("/api/plan", {}), ("/api/queue", {"action": "add"})])
def test_the_error_of_a_command_is_shown(runs, path, more):
    status, answer = post(make_app(runs), path, {"run": str(runs / "none.yaml"), **more})
    assert status == 400
    assert "none.yaml" in answer["error"] and answer["error"].count("error: ") == 1
