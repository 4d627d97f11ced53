"""Do the tests see a mistake? Random small faults are put into the sources, one at a time, and the tests that reach
them are run.

    python -m tests.mutate trace tests/planner --work /tmp/mutate       # once a package: which test runs which lines
    python -m tests.mutate run planner --count 60 --work /tmp/mutate    # one JSON line for each fault
    python -m tests.mutate report --work /tmp/mutate

Works on a copy of the repository, so that processes which tests start see the fault too. Tests are collected once, and
each fault runs in a fork of that process. A fault is *killed* when a test fails or takes much longer than it did; one
that survives the tests that reach its line is shown with its difference. Equivalent faults (the program does the same)
survive rightly: a person has to look.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import gc
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SELECTED = "not slow and not real and not gpu and not distributed"
BUDGET_S = 8.0  # of tests for one fault, by the times of the traced run, the shortest first
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
Change = Callable[[], None]


def faults(tree: ast.Module) -> Iterator[tuple[int, str, Change]]:
    """(line, what, change) for each place; ``change`` alters ``tree`` itself. Annotations, texts and decorators are
    left alone.
    """
    for node, skipped in _walk(tree):
        if not skipped:
            yield from _expression_faults(node)
            yield from _statement_faults(node)


def _walk(node: ast.AST, skipped: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    yield node, skipped
    for name, value in ast.iter_fields(node):
        unfit = name in ("annotation", "returns", "decorator_list") or isinstance(
            node, (ast.JoinedStr, ast.Import, ast.ImportFrom)
        )
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
            yield (
                node.lineno,
                "arguments swapped",
                lambda: node.args.__setitem__(slice(0, 2), [node.args[1], node.args[0]]),
            )
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
    return any(
        isinstance(each, ast.JoinedStr) or isinstance(getattr(each, "value", None), str) for each in ast.walk(node)
    )


class Tracer:
    """A plugin of pytest: which lines of the package each test runs in this process, how long it takes, and whether it
    passes.
    """

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
            self.tests.setdefault(item.nodeid, {"passed": True}).update(
                s=round(time.perf_counter() - start, 2), lines=found
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.tests.setdefault(report.nodeid, {})["passed"] = False


def copied(work: Path) -> Path:
    """A copy of the sources and tests to put faults into."""
    tree = work / "tree"
    if not tree.exists():
        for name in ("src", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "Makefile", "constraints.txt", "README.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, tree / name)
    return tree


def enter(tree: Path) -> None:
    os.chdir(tree)
    os.environ |= {
        "PYTHONPATH": str(tree / "src"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_timeout",
    }
    sys.path[:0] = [str(tree / "src"), str(tree)]


def in_fork(log: Path, limit_s: float, work: Callable[[], int]) -> int | None:
    """Runs ``work`` in a fork with a session of its own; its exit code, None where it took too long."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = work()
        finally:
            os._exit(code)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end_group(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
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

        def traced(name: str = name, plugin: type[Tracer] = Saved) -> int:
            enter(tree)
            arguments = ["-q", "-p", "no:cacheprovider", "--timeout", "900", "-m", SELECTED, name]
            return int(pytest.main(arguments, plugins=[plugin(tree / "src" / "manyhands")]))

        code = in_fork(file.with_suffix(".log"), 3600, traced)
        print(f"{name}: exit code {code}", flush=True)


class Faults:
    """A plugin of pytest that, once tests are collected, runs some of them in a fork for each fault, in place of all of
    them once.

    A fault in a function replaces the code of that function wherever it is held; a constant of a module is replaced
    wherever it was imported; the file is written too, for processes that tests start. Faults elsewhere (bodies of
    classes, defaults) are not tried.
    """

    def __init__(
        self,
        tree: Path,
        places: list[tuple[str, int]],
        tests: dict[str, dict[str, Any]],
        work: Path,
        budget_s: float = BUDGET_S,
    ) -> None:
        self.package, self.places, self.tests, self.work, self.budget_s = (
            tree / "src" / "manyhands",
            places,
            tests,
            work,
            budget_s,
        )
        self.functions: dict[tuple[str, int, str], list[types.FunctionType]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType) and each.__code__.co_filename.startswith(str(self.package)):
                code = each.__code__
                self.functions.setdefault((code.co_filename, code.co_firstlineno, code.co_name), []).append(each)
        gc.freeze()
        items = {item.nodeid: item for item in session.items}
        with (self.work / "results.jsonl").open("a") as out, (self.work / "run.log").open("a") as log:
            for name, index in self.places:
                result = self.try_fault(session, items, name, index)
                out.write(json.dumps(result) + "\n")
                print(result["outcome"], name, result["line"], result["what"], result["s"], file=log)
                out.flush(), log.flush()
        return True

    def try_fault(
        self, session: pytest.Session, items: dict[str, pytest.Item], name: str, index: int
    ) -> dict[str, Any]:
        file = self.package / name
        source = file.read_text()
        parsed = ast.parse(source)
        before = ast.unparse(parsed)
        line, what, change = list(faults(parsed))[index]
        change()
        ast.fix_missing_locations(parsed)
        after = ast.unparse(parsed)
        chosen, took = [], 0.0
        for test in sorted((t for t in items if self.reaches(t, name, line)), key=self.seconds):
            if took < self.budget_s:
                chosen.append(items[test])
                took += self.seconds(test)
        start = time.monotonic()
        try:
            file.write_text(after)
            _forget(file)
            code = in_fork(
                self.work / "last.log",
                60 + 5 * took,
                lambda: self.run_tests(session, chosen, file, parsed, line, int(8 + took)),
            )
        finally:
            file.write_text(source)
            _forget(file)
        outcome = {
            0: "survived",
            1: "killed",
            None: "no verdict in time",
            -9: "killed, too slow",
            -24: "killed, too slow",
        }.get(code, f"odd: {code}")
        changed = "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))
        taken = {"num_tests": len(chosen), "s": round(time.monotonic() - start, 1)}
        return {
            "file": name,
            "index": index,
            "line": line,
            "what": what,
            "outcome": outcome,
            **taken,
            "difference": changed,
        }

    def reaches(self, test: str, name: str, line: int) -> bool:
        """As traced; of rooms that were not, tests in files of the source's name."""
        if test in self.tests:
            return line in self.tests[test]["lines"].get(name, ())
        return test.startswith(test_file(name))

    def seconds(self, test: str) -> float:
        return float(self.tests[test]["s"]) if test in self.tests else 0.4

    def run_tests(
        self,
        session: pytest.Session,
        chosen: list[pytest.Item],
        file: Path,
        parsed: ast.Module,
        line: int,
        limit_s: int,
    ) -> int:
        """In the fork: 1 where a test fails, 0 where none does, 77 where the fault could not be put in."""
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
        if not self.put_in(file, parsed, line):
            return 77
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0

    def put_in(self, file: Path, parsed: ast.Module, line: int) -> bool:
        compiled = compile(parsed, str(file), "exec", dont_inherit=True)
        function = enclosing_function(parsed, line)
        if function is not None:
            first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
            (code,) = [
                each for each in _codes(compiled) if (each.co_firstlineno, each.co_name) == (first, function.name)
            ]
            held = self.functions.get((str(file), first, function.name), [])
            for each in held:
                each.__code__ = code
            return bool(held)
        module = "manyhands." + ".".join(file.relative_to(self.package).with_suffix("").parts)
        old, new = (
            vars(sys.modules[module]),
            {"__name__": module, "__file__": str(file), "__package__": module.rpartition(".")[0]},
        )
        exec(compiled, new)
        constants = (int, float, str, tuple, dict, frozenset)
        changed = {
            key
            for key, value in new.items()
            if isinstance(value, constants) and key in old and not key.startswith("__")
        }
        changed = {key for key in changed if repr(old[key]) != repr(new[key])}
        for holder in list(sys.modules.values()):
            for key in changed:
                if getattr(holder, key, None) is old[key]:
                    setattr(holder, key, new[key])
        return bool(changed)


def enclosing_function(parsed: ast.Module, line: int) -> ast.FunctionDef | None:
    """The outermost function whose body holds the line, methods included."""
    bodies: list[ast.stmt] = list(parsed.body)
    while bodies:
        node = bodies.pop()
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or 0):
            return node
        if isinstance(node, (ast.ClassDef, ast.If)):
            bodies += node.body
    return None


def test_file(name: str) -> str:
    """kernels/lora.py: tests/kernels/test_lora"""
    room, _, stem = name.removesuffix(".py").rpartition("/")
    return f"tests/{room}/test_{stem}"


def can_be_put_in(parsed: ast.Module, line: int) -> bool:
    constants = [node for node in parsed.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    return enclosing_function(parsed, line) is not None or any(
        node.lineno <= line <= (node.end_lineno or 0) for node in constants
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def run(options: argparse.Namespace) -> None:
    tree, chooser = copied(options.work), random.Random(options.seed)
    tests: dict[str, dict[str, Any]] = {}
    for file in options.work.glob("*.trace.json"):
        tests |= {
            name: test for name, test in json.loads(file.read_text()).items() if test.get("passed") and "lines" in test
        }
    package = tree / "src" / "manyhands"
    files = [
        file
        for room in options.rooms
        for file in ([package / room] if room.endswith(".py") else sorted((package / room).rglob("*.py")))
    ]
    places = []
    for file in files:
        name, source = str(file.relative_to(package)), file.read_text()
        parsed = ast.parse(source)
        lines = {line for test in tests.values() for line in test["lines"].get(name, ())}
        if not lines and list(tree.glob(f"{test_file(name)}*.py")):
            lines = set(range(source.count("\n") + 1))
        places += [
            (name, index)
            for index, fault in enumerate(faults(parsed))
            if fault[0] in lines and can_be_put_in(parsed, fault[0])
        ]
    chooser.shuffle(places)
    results = read(options.work / "results.jsonl")
    if options.again:
        survived = {(result["file"], result["index"]) for result in results if result["outcome"] == "survived"}
        places = [place for place in places if place in survived]
    else:
        tried = {(result["file"], result["index"]) for result in results}
        places = [place for place in places[: options.count] if place not in tried]
    names = {name for name, _ in places}
    reaching = {test: found for test, found in tests.items() if names & set(found["lines"])}
    unknown = [name for name in names if not any(name in found["lines"] for found in tests.values())]
    untraced = {str(file.relative_to(tree)) for name in unknown for file in tree.glob(f"{test_file(name)}*.py")}
    chosen = sorted({test.partition("::")[0] for test in reaching} | untraced)
    enter(tree)
    plugin = Faults(tree, places, reaching, options.work, math.inf if options.again else BUDGET_S)
    arguments = ["-q", "-p", "no:cacheprovider", "--timeout", "300", "-m", SELECTED]
    pytest.main([*arguments, *chosen], plugins=[plugin])


def _forget(file: Path) -> None:
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(options: argparse.Namespace) -> None:
    results = list(
        {(result["file"], result["index"]): result for result in read(options.work / "results.jsonl")}.values()
    )  # the last ones
    count = Counter((result["file"], "survived" if result["outcome"] == "survived" else "killed") for result in results)
    for name in sorted({name for name, _ in count}):
        print(f"{name}: {count[name, 'killed']} killed, {count[name, 'survived']} survived")
    survived = [result for result in results if result["outcome"] == "survived"]
    print(f"{len(results)} faults, {len(results) - len(survived)} killed, {len(survived)} survived")
    for result in survived:
        place = f"{result['file']}:{result['line']}"
        print(f"\n{place} {result['what']} ({result['num_tests']} tests)\n{result['difference']}")


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
            command.add_argument(
                "--again", action="store_true", help="those that survived, with all tests that reach them"
            )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.work.mkdir(parents=True, exist_ok=True)
    if options.function is not report:
        preload()
    options.function(options)


def preload() -> None:
    """What every test needs and no fault touches, imported once for all forks. Nothing of the package: the copy is to
    be imported.
    """
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
