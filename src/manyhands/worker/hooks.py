"""Hooks and metrics of the user's: named by module or file, imported by every rank."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.training.types import Evaluation, Hook, TrainState
from manyhands.worker.context import RankContext

MakeHook = Callable[[RankContext], Hook]


def read_hooks(hooks: Sequence[Any], metrics: Mapping[str, Any] | Sequence[str] | None) -> list[MakeHook]:
    """What makes the hooks, once the model is there. ``hooks``: functions of the context that return a hook;
    ``metrics``: functions of an ``Evaluation`` by name, or ``name=reference``. Both may be references. UserError.
    """
    pairs = metrics.items() if isinstance(metrics, Mapping) else [one.partition("=")[::2] for one in metrics or ()]
    functions = {name: find(one) for name, one in pairs}
    made: list[MakeHook] = [partial(_make, find(hook)) for hook in hooks]
    return [*made, partial(MetricHook, functions=functions)] if functions else made


def find(reference: Any) -> Any:
    """The object that ``module:name`` or ``path/to/file.py:name`` names; any other object is itself."""
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


def _make(function: Callable[[RankContext], Any], rank: RankContext) -> Hook:
    hook = function(rank)
    if not isinstance(hook, Hook):
        raise UserError(
            f"{getattr(function, '__qualname__', function)} returned a {type(hook).__name__}, not a hook",
            fix="return an object of a subclass of manyhands.training.types.Hook",
        )
    return hook


class MetricHook(Hook):
    """Functions of an evaluation, computed by rank 0, which has the answers."""

    def __init__(self, rank: RankContext, functions: Mapping[str, Callable[[Evaluation], float]]) -> None:
        self.rank, self.functions = rank, functions

    def measure(self, state: TrainState, evaluation: Evaluation) -> Mapping[str, float]:
        if not self.rank.is_first:
            return {}
        found = {name: function(evaluation) for name, function in self.functions.items()}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UserError(
                    f"the metric {name!r} is a {type(value).__name__}, not a number", where=f"step {state.step}"
                )
        text = ", ".join(f"{name} {value:.4g}" for name, value in found.items() if math.isfinite(value))
        self.rank.print(f"metrics after step {state.step}: {text}")
        return {name: float(value) for name, value in found.items()}
