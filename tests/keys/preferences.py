"""Effects of ``preference.*``: the loss of a model that is not trained yet is known by each formula, as all margins are
0; later losses show the rest.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from manyhands.core.errors import UserError
from tests.keys.lab import Lab, Ran, make_rows


def run_pairs(lab: Lab, **preference: Any) -> Ran:
    rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "zeta zeta"} for row in make_rows(60)]
    keys = {"task": "preference", "data.train": lab.write_rows("pairs.jsonl", rows), "stop.max_steps": 2}
    return lab.run(keys | {f"preference.{name}": value for name, value in preference.items()})


def loss(lab: Lab) -> None:
    first = {name: run_pairs(lab, loss=name).losses[0] for name in ("sigmoid", "robust", "hinge", "ipo")}
    assert first == pytest.approx({"sigmoid": math.log(2), "robust": math.log(2), "hinge": 1.0, "ipo": 25.0}, rel=1e-6)
    assert run_pairs(lab, loss="orpo").column("terms")[0].keys() == {"preference", "sft"}
    with pytest.raises(UserError, match=r"`preference.loss` has no effect with `task: sft`"):
        lab.config({"preference.loss": "ipo"})


def reference(lab: Lab) -> None:
    def find(**keys: Any) -> str:
        plan = lab.prepare({"task": "preference", "data.train": pairs, **keys}).plan
        return plan.reference

    rows = [{"prompt": "alpha", "chosen": f"beta {n}", "rejected": "zeta"} for n in range(30)]
    pairs = lab.write_rows("few.jsonl", rows)
    assert find() == find(**{"preference.reference": "adapters", "stop.epochs": 3}) == "adapters"
    assert find(**{"stop.epochs": 3}) == find(**{"method.name": "full"}) == "stored"
    assert find(**{"preference.reference": "stored"}) == "stored" and find(**{"preference.loss": "orpo"}) == "none"
    with pytest.raises(UserError, match=r"`method.name: full` does not fit `preference.reference: adapters`"):
        lab.config({"task": "preference", "method.name": "full", "preference.reference": "adapters"})
    with pytest.raises(UserError, match=r"`preference.reference` has no effect with `preference.loss: simpo`"):
        lab.config({"task": "preference", "preference.loss": "simpo", "preference.reference": "stored"})


def share_prompts(lab: Lab) -> None:
    once, copied = run_pairs(lab, share_prompts=True), run_pairs(lab, share_prompts=False)
    assert once.losses == pytest.approx(copied.losses, rel=1e-5)
    assert once.rank.plan.data.tokens < copied.rank.plan.data.tokens
    with pytest.raises(UserError, match=r"`preference.share_prompts` has no effect with `task: kto`"):
        lab.config({"task": "kto", "preference.share_prompts": True})


def beta(lab: Lab) -> None:
    assert run_pairs(lab, loss="ipo", beta=0.5).losses[0] == pytest.approx(1.0, rel=1e-6)
    assert run_pairs(lab, beta=0.5).losses[1] < run_pairs(lab).losses[1]


def label_smoothing(lab: Lab) -> None:
    smoothed, plain = run_pairs(lab, label_smoothing=0.3).losses, run_pairs(lab).losses
    assert smoothed[0] == pytest.approx(plain[0], rel=1e-6) and smoothed[1] > plain[1]


def margin(lab: Lab) -> None:
    assert run_pairs(lab, loss="simpo", margin=1.0).losses[0] > run_pairs(lab, loss="simpo", margin=0.0).losses[0]


def sft_weight(lab: Lab) -> None:
    ran = run_pairs(lab, sft_weight=2.0)
    terms = ran.column("terms")[0]
    assert terms.keys() == {"preference", "sft"}
    assert ran.losses[0] == pytest.approx(terms["preference"] + 2 * terms["sft"]) and terms["sft"] > 1


def run_judged(lab: Lab, **preference: Any) -> Ran:
    rows = [{**row, "label": number % 2 > 0} for number, row in enumerate(make_rows(60))]
    keys = {"task": "kto", "data.train": lab.write_rows("judged.jsonl", rows), "stop.max_steps": 2}
    return lab.run(keys | {f"preference.{name}": value for name, value in preference.items()})


def desirable_weight(lab: Lab) -> None:
    plain, neither = run_judged(lab).losses, run_judged(lab, desirable_weight=0.0, undesirable_weight=0.0).losses
    assert plain[0] == 0.5 and neither == [0, 0]
    assert 0 < run_judged(lab, desirable_weight=0.0).losses[0] < 0.5
    with pytest.raises(UserError, match=r"`preference.desirable_weight` has no effect with `task: preference`"):
        lab.config({"task": "preference", "preference.desirable_weight": 2.0})
    for keys, why in (
        ({"preference.loss": "ipo"}, "`preference.loss` has no effect with `task: kto`"),
        ({"method.name": "full"}, "`method.name: full` does not fit `task: kto`"),
        ({"preference.reference": "stored"}, "`preference.reference: stored` does not fit `task: kto`"),
        ({"batch.samples": 1}, "`batch.samples: 1` does not fit `task: kto`"),
    ):
        with pytest.raises(UserError) as error:
            lab.config({"task": "kto", **keys})
        assert why in str(error.value)


def undesirable_weight(lab: Lab) -> None:
    assert (
        0 < run_judged(lab, undesirable_weight=0.0).losses[0] < 0.5 < run_judged(lab, undesirable_weight=3.0).losses[0]
    )
