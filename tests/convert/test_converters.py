"""Converters: the plan names them, the worker loops over them, and one from outside needs no change of the product."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import manyhands.worker
from manyhands.convert.build import make
from manyhands.convert.protocol import BaseConverter, Context
from manyhands.core.errors import UserError
from manyhands.planner.converters import CONVERTERS
from tests.keys.lab import Lab, open_lab
from tests.keys.work import forward
from tests.support.tiny import tiny_plan, tiny_run
from tests.support.toy import FACTOR, LAYER

FEATURES = re.compile("lora|nf4|qlora|fp8|loftq|dora|tower|adapter|fused", re.IGNORECASE)
TOY = "tests.support.toy:Scale"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("converters")) as lab:
        yield lab


@pytest.mark.ci
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_converter_from_outside_is_named_by_the_plan_and_trained_with(
    lab: Lab, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does on meta and to the weights cancels out, so the losses are those of a run without it; each hook is
    seen.
    """
    keys = {"method.name": method, "stop.max_steps": 2}
    plain, toy = lab.start(keys), lab.start({**keys, "model.converters": [TOY]})
    assert toy.plan.converters == (*plain.plan.converters, TOY)
    weights = [rank.model.get_submodule(LAYER).down_proj.weight.detach() for rank in (plain, toy)]
    assert torch.equal(weights[0] * FACTOR, weights[1])
    assert forward(toy).item() == pytest.approx(forward(plain).item(), rel=1e-6)
    lab.check(toy)
    assert isinstance(toy.terminal, io.StringIO)
    said = toy.terminal.getvalue()
    assert f"scale: {LAYER} by {FACTOR}" in said and "scale: the loss is" in said
    assert toy.measured["scale_loss"] > 0
    trained = lab.train(toy)
    assert trained.losses[0] == pytest.approx(lab.train(plain).losses[0], rel=1e-6)
    assert not torch.equal(next(p for p in toy.model.parameters() if p.requires_grad).detach(), weights[1])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sparse", "no converter is called 'sparse'"),
        ("tests.support.toy:Shift", "cannot be imported"),
        ("no.such:Thing", "cannot be imported"),
        (":", "cannot be imported"),
        ("broken_converter:Thing", "'broken_converter:Thing' cannot be imported"),
        ("json:dumps", "is not a converter"),
        ("tests.support.toy:Finding", "is not a converter"),
    ],
)
def test_what_is_no_converter_is_named(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_converter.py").write_text("from json import no_such_name\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        make(name, Context(tiny_run("model"), tiny_plan("model"), torch.device("cpu")))
    assert name != "broken_converter:Thing" or "no_such_name" in caught.value.why


def test_each_converter_is_a_class_of_its_own() -> None:
    context = Context(tiny_run("model"), tiny_plan("model"), torch.device("cpu"))
    made = [make(name, context) for name in CONVERTERS]
    assert all(isinstance(converter, BaseConverter) for converter in made)
    assert all(type(converter).__doc__ for converter in made)
    assert [type(converter).__name__ for converter in made if list(converter.describe())] == ["Neftune"]
    assert len({type(converter) for converter in made}) == len(made)


@pytest.mark.ci
def test_features_that_a_plan_does_not_name_are_not_imported() -> None:
    code = (
        "import sys, manyhands.convert.build as b\n"
        "print([s.place for s in b.CONVERTERS.values() if s.place.split(':')[0] in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "convert.loftq" not in done.stdout
        and "fused_modules" not in done.stdout
        and "convert.attention_kernels" not in done.stdout
    )


def test_the_worker_names_no_feature() -> None:
    folder = Path(manyhands.worker.__file__).parent
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FEATURES.search(line)
    ]
    assert found == []
