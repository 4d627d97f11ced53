"""manyhands: multi-GPU fine-tuning that is planned before it is launched and proves what it says.

From Python, with nothing heavy imported before it is used::

    import manyhands as mh

    plan = mh.plan("run.yaml", gpus="8xH200")
    print(plan.explain())
    run = mh.train("run.yaml", {"batch.samples": 64})
    model = mh.load(run.folder)
    print(model.generate(["Why is the sky blue?"]))
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.api import *  # noqa: F403
    from manyhands.api import plan as plan
    from manyhands.api import train as train

__version__ = "0.1.0"
_FUNCTIONS = ("plan", "train")  # names of packages of ours, and of functions of the API


class _CallablePackage(ModuleType):
    """A package that is a function as well: ``manyhands.plan("run.yaml")`` beside ``manyhands.plan.search``."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._function)

    @property
    def _function(self) -> Any:
        from manyhands import api

        return getattr(api, self.__name__.rpartition(".")[2])


class _Root(ModuleType):
    """This package. Importing ``manyhands.plan.search`` sets the attribute ``plan`` to the package, which must stay
    callable.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FUNCTIONS and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        from importlib import import_module

        if name in _FUNCTIONS:
            return import_module(f"manyhands.{name}")
        api = import_module("manyhands.api") if not name.startswith("_") else None
        if api is None or name not in api.__all__:
            raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
        return getattr(api, name)

    def __dir__(self) -> list[str]:
        from manyhands import api

        return sorted({*super().__dir__(), *api.__all__})


sys.modules[__name__].__class__ = _Root
