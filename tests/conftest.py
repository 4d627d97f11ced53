"""What all tests share: markers that skip with a reason, a path for the processes that tests start, the real model."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Begun first, so that where files run side by side no long one begins when all others have ended.
LONGEST = ("docs", "equality", "matrix", "e2e", "faults", "guides", "engine", "convert", "data", "test_every_key.py")
# Slow tests of these files and folders are too long for CI, as are the slow cases of a table of which CI runs others:
# `make test-all` runs them before a release.
NIGHTLY = (
    *("docs/test_notebook.py", "docs/test_recipes.py", "equality", "matrix", "faults", "test_every_key.py"),
    *(f"e2e/test_{name}.py" for name in ("deepspeed", "endings", "guards", "hangs", "loftq", "loopback")),
    *("e2e/test_multimodal.py", "guides/test_blocks.py", "guides/test_foreign.py", "engine/test_graph_cache.py"),
    *("e2e/test_nodes.py", "e2e/test_ropes.py", "engine/test_deepspeed.py"),
    *("engine/test_image_layouts.py", "data/test_images.py", "model/test_images.py", "importers/test_every_value.py"),
    *("submit/test_cluster.py", "api/test_guide.py", "api/test_examples.py"),
)
IN_ROOT = set(os.listdir(ROOT))  # before the tests
# Workers that tests start import the package from the sources, also where it is not installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A rank alone takes all cores by its plan; its threads would spin while they wait for each other on busy cores, which
# costs eight times the processor time of the run.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell starts background jobs with SIGINT ignored, and the processes that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin(
        "timeout"
    ):  # machines without pytest-timeout run the tests too, with strict settings
        parser.addini("timeout", "seconds that a test may take; acts where pytest-timeout is installed")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): acts where pytest-timeout is installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place_in_line)
    nightly = tuple(ROOT / "tests" / name for name in NIGHTLY)
    for item in items:
        in_part = item.get_closest_marker("ci") or any(item.path.is_relative_to(path) for path in nightly)
        if item.get_closest_marker("slow") and in_part:
            item.add_marker(pytest.mark.nightly)
        if "many" in getattr(item, "fixturenames", ()):  # whoever comes first makes many runs
            item.add_marker(pytest.mark.timeout(1200))
    needs = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    num_gpus = _count_gpus() if needs else 0
    for item, marker in needs:
        num_needed = marker.args[0] if marker.args else 1
        if num_gpus < num_needed:
            reason = f"needs {num_needed} GPUs, {num_gpus} visible" if num_gpus else "no CUDA GPU is visible"
            item.add_marker(pytest.mark.skip(reason=reason))
    if _smollm2() is None:
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason="MANYHANDS_SMOLLM2 names no folder with the real model"))


def _place_in_line(item: pytest.Item) -> int:
    below = item.path.relative_to(ROOT / "tests").parts[0] if item.path.is_relative_to(ROOT / "tests") else ""
    return LONGEST.index(below) if below in LONGEST else len(LONGEST)


def pytest_collection_finish() -> None:
    """Modules imported so far, hundreds of thousands of objects, are not searched for garbage again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Says what tests have written into the repository's folder: another that looks for nothing there finds it."""
    left = {name for name in {*os.listdir(ROOT)} - IN_ROOT if not name.startswith((".", "__"))} - {"build", "dist"}
    if left and not hasattr(session.config, "workerinput"):
        print(f"\na test has left {', '.join(sorted(left))} in {ROOT}: give it a folder of its own")


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _smollm2() -> Path | None:
    folder = os.environ.get("MANYHANDS_SMOLLM2")
    return Path(folder) if folder and Path(folder, "config.json").exists() else None


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real model; a test that takes it is marked ``real``."""
    folder = _smollm2()
    if folder is None:
        pytest.skip("MANYHANDS_SMOLLM2 names no folder with the real model")
    return folder


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """Four gloo processes that serve every in-process distributed test of the session; starting them takes seconds."""
    from tests.support.ranks import ranks

    with ranks(4) as four:
        yield four
