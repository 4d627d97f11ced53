"""Planning and the command line need no torch: a laptop answers at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PROBE = """
import importlib, pkgutil, sys
packages = "config importers families facts planner launch preview submit cli api".split()
for name in (*packages, "data.read", "data.chat", "data.tokenize", "data.store"):
    package = importlib.import_module(f"manyhands.{name}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", "api.rank")):
            importlib.import_module(module.name)
            heavy = {"torch", "transformers"} & set(sys.modules)
            if heavy:
                sys.exit(f"{module.name} imports {', '.join(heavy)}")
print("free")
"""


def test_the_planning_packages_import_no_torch():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    probe = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=120)
    assert (probe.stdout.strip(), probe.returncode) == ("free", 0), probe.stderr
