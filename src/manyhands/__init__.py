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

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    from importlib import import_module

    api = import_module("manyhands.api") if not name.startswith("_") else None
    if api is None or name not in api.__all__:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    from manyhands import api

    return sorted({*globals(), *api.__all__})
