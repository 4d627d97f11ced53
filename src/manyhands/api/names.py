"""The name by which another process can import a function or class of the caller's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError


def name_object(thing: Any) -> str:
    """``module:name``, or ``path/to/script.py:name`` for what the main script defines. UserError where a rank could not
    import it.
    """
    if isinstance(thing, str):
        return thing
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if module is None or not name or "<" in name:
        raise _unnamed(thing, "it has no name in a module" if "<lambda>" not in name else "a lambda has no name")
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file is None:
        raise _unnamed(thing, "it is defined in a notebook or on a console")
    if file is not None and (module == "__main__" or _is_beside_script(module, Path(file))):
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"


def _is_beside_script(module: str, file: Path) -> bool:
    """A module that only this script's own folder makes importable."""
    return "." not in module and bool(sys.path) and file.parent == Path(sys.path[0] or ".").resolve()


def _unnamed(thing: Any, why: str) -> UserError:
    return UserError(
        f"{getattr(thing, '__qualname__', type(thing).__name__)} cannot be imported by the ranks",
        why=f"{why}, and hooks and metrics run in processes of their own",
        fix="put it into a module (in a notebook: %%writefile my_hooks.py), and give it or 'my_hooks:name'",
    )
