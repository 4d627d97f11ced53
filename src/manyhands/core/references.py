"""Objects of the user's that a text names: ``module:name``, or ``path/to/file.py:name``."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError


def import_reference(reference: Any) -> Any:
    """The object that ``module:name`` or ``path/to/file.py:name`` names; any other object is itself. UserError."""
    if not isinstance(reference, str):
        return reference
    place, _, name = reference.rpartition(":")
    try:
        found: Any = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except UserError:
        raise
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise UserError(
            f"{reference!r} cannot be imported",
            why=f"{type(error).__name__}: {error}",
            fix="write module:name, or path/to/file.py:name, of something that can be called",
        ) from error


def _import_file(path: Path) -> Any:
    """As a module that is not ``__main__``: what is behind that line is not executed."""
    path = path.resolve()
    name = f"manyhands_user_{path.stem}_{zlib.crc32(bytes(path)):08x}"  # two folders may have a file of the same name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
