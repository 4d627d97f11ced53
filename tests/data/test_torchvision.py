"""Models whose images torchvision prepares: tested in a process that has it, and refused in one that has not."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.data.images.open import open_processor
from manyhands.data.images.processor import family_of
from tests.support.torchvision import TYPES, is_there
from tests.support.vision import write_tiny_processor

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/data/test_images.py", "tests/model/test_images.py", "tests/engine/test_image_layouts.py")
ONE_TYPE = "tests/model/test_feature_runs.py"


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("types", [TYPES[:2], pytest.param(TYPES[2:], marks=pytest.mark.slow)], ids=" ".join)
def test_images_are_trained_where_torchvision_is(types: tuple[str, ...]) -> None:
    """Each type's tests of data, of the loaded model, of twenty steps and of kept features: skipped elsewhere."""
    if is_there():
        pytest.skip("torchvision is installed: the tests run where they are")
    if not (Path(os.environ.get("MANYHANDS_TORCHVISION") or ".", "torchvision")).is_dir():
        pytest.skip("MANYHANDS_TORCHVISION names no folder with torchvision: make test-ci installs one")
    own = ("-q", "-p", "no:cacheprovider", "-k", " or ".join(types), *FILES, ONE_TYPE)
    command = (sys.executable, "-m", "tests.support.torchvision", *own)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    num_passed, _, rest = done.stdout.splitlines()[-1].partition(" passed")
    assert int(num_passed) >= len(FILES) * len(types) + ("lfm2_vl" in types), done.stdout[-1000:]
    assert "skipped" not in rest, done.stdout[-1000:]


@pytest.mark.parametrize(
    ("state", "what", "why"),
    [
        ("missing", "images of models of type lfm2_vl need torchvision, which is not installed", "torchvision alone"),
        (
            "of another torch",
            "the installed torchvision cannot be imported",
            "operator torchvision::nms does not exist",
        ),
    ],
)
def test_torchvision_that_is_missing_or_broken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, what: str, why: str
) -> None:
    folder = write_tiny_processor(tmp_path / "lfm2_vl", "lfm2_vl")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    if state == "missing":
        monkeypatch.setitem(sys.modules, "torchvision", None)  # as Python has what cannot be found
    else:
        (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
    layout = family_of(folder).images
    assert layout is not None
    with pytest.raises(UserError) as refused:
        open_processor(folder, layout)
    assert what in refused.value.what and why in refused.value.why
    assert "pip install torchvision torch==" in refused.value.fix
