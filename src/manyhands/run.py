"""``python -m manyhands.run SCRIPT [ARGUMENTS]``: a script or a notebook that imports from Unsloth or TRL, with our
names in their place; nothing that is installed is changed.

In a notebook: ``from manyhands.run import replace_imports; replace_imports()`` in the first cell.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import re
import runpy
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manyhands.core.errors import EXIT_USAGE, UserError
from manyhands.core.text import print_safely

PACKAGES = ("unsloth", "trl")
OF_NOTEBOOKS = re.compile(r"^(\s*)[!%].*$", re.MULTILINE)  # commands of the shell and of IPython


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module of these packages, with the names of ``api.foreign``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        from manyhands.api.foreign import STANDS_FOR, find_name

        package = module.__name__.partition(".")[0]
        module.__dict__["__all__"] = list(STANDS_FOR[package])
        module.__dict__["__getattr__"] = lambda name: find_name(package, name)


def replace_imports() -> None:
    """From here on this process imports ours. UserError where the other package has been imported."""
    if found := [name for name in PACKAGES if name in sys.modules]:
        raise UserError(
            f"{found[0]} is imported already",
            where="replace_imports",
            fix="call it before the first import; in a notebook restart the kernel, and call it in the first cell",
        )
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


@contextmanager
def as_script(path: Path) -> Iterator[Path]:
    """The file, or a notebook's code cells as a script: without shell commands, and cells that begin with %%."""
    if path.suffix != ".ipynb":
        yield path
        return
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_bytes())["cells"] if cell["cell_type"] == "code"]
    text = "\n\n".join(OF_NOTEBOOKS.sub(r"\1pass", cell) for cell in cells if not cell.startswith("%%"))
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{path.stem}.py"
        script.write_text(text, encoding="utf-8")
        yield script


def main(argv: list[str]) -> int:
    if not argv or not Path(argv[0]).is_file():
        given = argv[0] if argv else "nothing"
        print(UserError(f"{given} is no file", fix="python -m manyhands.run SCRIPT.py [ARGUMENTS]"), file=sys.stderr)
        return EXIT_USAGE
    path = Path(argv[0])
    sys.argv, sys.path[0] = argv, str(path.resolve().parent)
    with as_script(path) as script:
        try:
            replace_imports()
            runpy.run_path(str(script), run_name="__main__")
        except UserError as error:
            lines = [
                frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)
            ]
            print(error, *(f"  line: {path.name}:{line}" for line in lines[-1:]), sep="\n", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    print_safely()
    sys.exit(main(sys.argv[1:]))
