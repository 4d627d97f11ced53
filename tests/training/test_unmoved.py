"""A run that has changed no weight says so, where it ends and in its report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from manyhands.worker import export_stages
from tests.keys.lab import Lab, open_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab")) as opened:
        yield opened


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(("rate", "moves"), [(1e-308, False), (1e-3, True)])
def test_the_last_line_and_the_report_say_whether_no_weight_has_moved(
    lab: Lab, method: str, rate: float, moves: bool
) -> None:
    keys = {"method.name": method, "optimizer.learning_rate": rate}
    rank = lab.start(keys)
    begin = {name: parameter.detach().clone() for name, parameter in rank.model.named_parameters()}
    ran = lab.train(rank)
    assert moves != all(torch.equal(begin[name], parameter) for name, parameter in rank.model.named_parameters())
    export_stages.report(rank.rank, rank.data, rank.engine, rank.state, rank.measured)
    *_, last = rank.terminal.getvalue().splitlines()
    assert last == f"finished: {ran.folder}" + "; no weight has moved, see above" * (not moves)
    warning = "no weight has moved in 5 steps: what is saved is what was loaded"
    texts = [
        rank.terminal.getvalue(),
        *((ran.folder / f"report.{kind}").read_text() for kind in ("md", "html", "json")),
    ]
    assert [warning in text for text in texts] == [not moves] * 4
