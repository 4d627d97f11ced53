"""Do the tests see a mistake? Random small faults are put into the sources, one at a time, and the tests that reach them are run.

    python -m tests.mutate trace tests/plan --work /tmp/mutate       # once a room: which test runs which lines
    python -m tests.mutate run plan --count 60 --work /tmp/mutate    # faults in src/manyhands/plan, one JSON line each
    python -m tests.mutate report --work /tmp/mutate

Works on a copy of the repository, so that processes which tests start see the fault too. torch and transformers are imported once and
each fault runs in a fork. A fault is *killed* when a test fails or takes much longer than it did; one that survives the tests that
reach its line is shown with its difference. Equivalent faults (the program does the same) survive rightly: a person has to look.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SELECTED = "not slow and not real and not gpu"
BUDGET_S = 15.0  # of tests for one fault, by the times of the traced run, the shortest first
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
Change = Callable[[], None]


def faults(tree: ast.Module) -> Iterator[tuple[int, str, Change]]:
    """(line, what, change) for each place; ``change`` alters ``tree`` itself. Annotations, texts and decorators are left alone."""
    for node, skipped in _walk(tree):
        if not skipped:
            yield from _expression_faults(node)
            yield from _statement_faults(node)


def _walk(node: ast.AST, skipped: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    yield node, skipped
    for name, value in ast.iter_fields(node):
        unfit = name in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, skipped or unfit)


def _expression_faults(node: ast.AST) -> Iterator[tuple[int, str, Change]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield node.lineno, "comparison", lambda: node.ops.__setitem__(0, SWAPPED[type(node.ops[0])]())
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPPED and not _is_text(node):
        yield node.lineno, "arithmetic", lambda: setattr(node, "op", SWAPPED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield node.lineno, "boolean", lambda: setattr(node, "op", SWAPPED[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield (
            node.lineno,
            "not removed",
            lambda: _become(node, ast.UnaryOp(ast.UAdd(), ast.Call(ast.Name("bool", ast.Load()), [node.operand], []))),
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node.lineno, "constant", lambda: setattr(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node.lineno, "off by one", lambda: setattr(node, "value", node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield node.lineno, "constant", lambda: setattr(node, "value", node.value * 1.5 + 1e-3)
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield node.lineno, "name", lambda: setattr(node.func, "id", NAMES[node.func.id])
        symmetric = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
        if len(node.args) >= 2 and not symmetric and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            yield node.lineno, "arguments swapped", lambda: node.args.__setitem__(slice(0, 2), [node.args[1], node.args[0]])
    elif isinstance(node, (ast.IfExp, ast.If, ast.While)):
        yield node.test.lineno, "condition turned", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))


def _statement_faults(node: ast.AST) -> Iterator[tuple[int, str, Change]]:
    removable = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
    if isinstance(node, removable) or is_call:
        assert isinstance(node, ast.stmt)
        yield node.lineno, "statement removed", lambda: _become(node, ast.Pass())


def _become(node: ast.AST, other: ast.AST) -> None:
    """Turns ``node`` into ``other`` in place."""
    line = {name: getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
    other = copy.deepcopy(other)
    node.__class__ = type(other)  # type: ignore[assignment]
    node.__dict__.clear()
    node.__dict__.update(other.__dict__ | line)


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(each, ast.JoinedStr) or isinstance(getattr(each, "value", None), str) for each in ast.walk(node))


class Tracer:
    """A plugin of pytest: which lines of the package each test runs in this process, how long it takes, and whether it passes."""

    def __init__(self, package: Path) -> None:
        self.prefix = str(package) + os.sep
        self.tests: dict[str, dict[str, Any]] = {}
        self.lines: set[tuple[str, int]] = set()

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self.prefix):
            return None
        name, lines = file[len(self.prefix) :], self.lines

        def local(frame: Any, event: str, _: Any) -> Any:
            lines.add((name, frame.f_lineno))
            return local

        return local(frame, event, _)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines, start = set(), time.perf_counter()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            found: dict[str, list[int]] = {}
            for name, line in sorted(self.lines):
                found.setdefault(name, []).append(line)
            self.tests.setdefault(item.nodeid, {"passed": True}).update(s=round(time.perf_counter() - start, 2), lines=found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.tests.setdefault(report.nodeid, {})["passed"] = False


class Only:
    """A plugin of pytest: runs these tests, in this order."""

    def __init__(self, chosen: list[str]) -> None:
        self.order = {name: place for place, name in enumerate(chosen)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid])


def copied(work: Path) -> Path:
    """A copy of the sources and tests to put faults into."""
    tree = work / "tree"
    if not tree.exists():
        for name in ("src", "tests", "bench", "examples", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "Makefile", "constraints.txt", "README.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, tree / name)
    return tree


def in_fork(tree: Path, arguments: list[str], limit_s: float, log: Path, plugins: Callable[[], list[Any]] = list) -> int | None:
    """pytest in a fork whose current folder is ``tree``; its exit code, None where it took too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        sys.path[:0] = [str(tree / "src"), str(tree)]
        code = 99
        try:
            code = int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", *arguments], plugins=plugins()))
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end_group(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    _end_group(child)
    os.waitpid(child, 0)
    return None


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def trace(options: argparse.Namespace) -> None:
    tree = copied(options.work)
    for name in options.tests:
        file = options.work / f"{name.replace('/', '-')}.trace.json"

        class Saved(Tracer):
            def pytest_sessionfinish(self) -> None:
                file.write_text(json.dumps(self.tests))  # noqa: B023 - used before the next turn

        arguments = ["-m", SELECTED, "--timeout", "900", name]
        code = in_fork(tree, arguments, 3600, file.with_suffix(".log"), lambda: [Saved(tree / "src" / "manyhands")])
        print(f"{name}: exit code {code}", flush=True)


def run(options: argparse.Namespace) -> None:
    tree, chooser = copied(options.work), random.Random(options.seed)
    tests: dict[str, dict[str, Any]] = {}
    for file in options.work.glob("*.trace.json"):
        tests |= {name: test for name, test in json.loads(file.read_text()).items() if test.get("passed") and "lines" in test}
    places = []
    for room in options.rooms:
        package = tree / "src" / "manyhands"
        for file in [package / room] if room.endswith(".py") else sorted((package / room).rglob("*.py")):
            name = str(file.relative_to(package))
            reached = {line for test in tests.values() for line in test["lines"].get(name, ())}
            places += [(name, index) for index, fault in enumerate(faults(ast.parse(file.read_text()))) if fault[0] in reached]
    chooser.shuffle(places)
    results = options.work / "results.jsonl"
    tried = {(result["file"], result["index"]) for result in read(results)}
    for name, index in places[: options.count]:
        if (name, index) in tried:
            continue
        result = try_fault(tree, name, index, tests, options.work)
        with results.open("a") as out:
            out.write(json.dumps(result) + "\n")
        print(result["outcome"], result["file"], result["line"], result["what"], result["s"], flush=True)


def try_fault(tree: Path, name: str, index: int, tests: dict[str, dict[str, Any]], work: Path) -> dict[str, Any]:
    file = tree / "src" / "manyhands" / name
    source = file.read_text()
    parsed = ast.parse(source)
    before = ast.unparse(parsed)
    line, what, change = list(faults(parsed))[index]
    change()
    after = ast.unparse(ast.fix_missing_locations(parsed))
    chosen, took = [], 0.0
    for test in sorted((t for t in tests if line in tests[t]["lines"].get(name, ())), key=lambda t: tests[t]["s"]):
        if took < BUDGET_S:
            chosen.append(test)
            took += tests[test]["s"]
    start = time.monotonic()
    try:
        file.write_text(after)
        _forget(file)
        files = sorted({test.partition("::")[0] for test in chosen})
        code = in_fork(tree, ["-x", "--timeout", "300", *files], 60 + 5 * took, work / "last.log", lambda: [Only(chosen)])
    finally:
        file.write_text(source)
        _forget(file)
    outcome = "survived" if code == 0 else "timeout" if code is None else "killed" if code in (1, 2) else f"odd {code}"
    changed = "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))
    return {
        "file": name,
        "index": index,
        "line": line,
        "what": what,
        "outcome": outcome,
        "num_tests": len(chosen),
        "s": round(time.monotonic() - start, 1),
        "difference": changed,
    }


def _forget(file: Path) -> None:
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(options: argparse.Namespace) -> None:
    results = read(options.work / "results.jsonl")
    count = Counter((result["file"], "survived" if result["outcome"] == "survived" else "killed") for result in results)
    for name in sorted({name for name, _ in count}):
        print(f"{name}: {count[name, 'killed']} killed, {count[name, 'survived']} survived")
    survived = [result for result in results if result["outcome"] == "survived"]
    print(f"{len(results)} faults, {len(results) - len(survived)} killed, {len(survived)} survived")
    for result in survived:
        print(f"\n{result['file']}:{result['line']} {result['what']} ({result['num_tests']} tests)\n{result['difference']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, positional in ((trace, "tests"), (run, "rooms"), (report, None)):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("--work", type=Path, default=Path("/tmp/manyhands-mutate"))
        if positional:
            command.add_argument(positional, nargs="+")
        if function is run:
            command.add_argument("--count", type=int, default=50)
            command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.work.mkdir(parents=True, exist_ok=True)
    if options.function is not report:
        preload()
    options.function(options)


def preload() -> None:
    """What every test needs and no fault touches, imported once for all forks. Nothing of the package: the copy is to be imported."""
    import bitsandbytes  # noqa: F401
    import hypothesis  # noqa: F401
    import peft  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch
    import transformers.models.gemma3.modeling_gemma3
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
