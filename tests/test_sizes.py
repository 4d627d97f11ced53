"""Sizes and names of the product's source: files, functions, classes. What is over a limit is listed with its place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "manyhands"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# path or path:function, and why it is longer than the limit.
EXCEPTIONS: dict[str, str] = {}


def long_files(folder: Path) -> Iterator[tuple[str, int]]:
    """(path, lines) of files over the limit."""
    for path in sorted(folder.rglob("*.py")):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            yield str(path.relative_to(folder)), num_lines


def long_functions(folder: Path) -> Iterator[tuple[str, int]]:
    """(path:function, lines) of functions over the limit, decorators and docstring included."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                num_lines = (node.end_lineno or first) - first + 1
                if num_lines > MAX_FUNCTION_LINES:
                    yield f"{path.relative_to(folder)}:{node.name}", num_lines


def repeated_classes(folder: Path) -> dict[str, list[str]]:
    """Public classes that several files define: name to files."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(folder)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_files_are_short() -> None:
    assert [f"{place}: {lines} lines" for place, lines in long_files(SOURCE) if place not in EXCEPTIONS] == []


def test_functions_are_short() -> None:
    assert [f"{place}: {lines} lines" for place, lines in long_functions(SOURCE) if place not in EXCEPTIONS] == []


def test_no_class_name_is_used_twice() -> None:
    assert repeated_classes(SOURCE) == {}


def test_exceptions_are_needed_and_have_reasons() -> None:
    over = {place for place, _ in (*long_files(SOURCE), *long_functions(SOURCE))}
    assert EXCEPTIONS.keys() <= over and all(EXCEPTIONS.values())


@pytest.mark.parametrize("num_over", [0, 1])
def test_the_limits_are_seen(tmp_path: Path, num_over: int) -> None:
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1 + num_over)
    (tmp_path / "a.py").write_text(f"class A:\n    pass\ndef f():\n{body}")
    (tmp_path / "b.py").write_text(
        f"class {'AB'[1 - num_over]}:\n    pass\n" + "y = 2\n" * (MAX_FILE_LINES - 2 + num_over)
    )
    expected_function = [("a.py:f", MAX_FUNCTION_LINES + 1)] * num_over
    assert list(long_functions(tmp_path)) == expected_function
    assert list(long_files(tmp_path)) == [("b.py", MAX_FILE_LINES + 1)] * num_over
    assert repeated_classes(tmp_path) == ({"A": ["a.py", "b.py"]} if num_over else {})
