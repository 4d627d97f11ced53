"""``import manyhands``: its names, without torch."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import inspect, sys
import manyhands as mh
assert not {"torch", "transformers", "pydantic"} & set(sys.modules), "import manyhands is not light"
names = [getattr(mh, name) for name in dir(mh)]
assert callable(mh.plan) and callable(mh.train) and callable(mh.load), "lazy"
assert "gpus" in inspect.signature(mh.plan).parameters
from manyhands import plan, train
assert callable(train) and mh.get_world_size() == 1 and mh.get_rank() == 0
assert not {"torch", "transformers"} & set(sys.modules), "the API imports torch before it is needed"
try:
    mh.nonsense
except AttributeError as error:
    print(error)
"""


def test_names_are_lazy() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("module 'manyhands' has no attribute 'nonsense'", "")
