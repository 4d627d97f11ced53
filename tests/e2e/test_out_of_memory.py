"""Memory that runs out: the run starts again from its last checkpoint with a smaller plan and the same global batch,
and says so once.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from manyhands.facts.host import read_host_facts
from manyhands.planner.types import Plan
from tests.e2e.conftest import SEVERAL_PACKS
from tests.e2e.runs import NO_VERIFY, NUM_STEPS, WORDS, Place, Run, at_step

OUT = "import torch\nraise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. And so on')"
pytestmark = pytest.mark.timeout(2400)


def out_of_memory(until_plan: int, step: int = 3, rank: int = 0) -> dict[str, str]:
    """A planted fault: one rank runs out of memory at a step of each plan before ``until_plan``."""
    return NO_VERIFY | at_step(
        step, f"if self.rank.plan.number < {until_plan}:\n    " + OUT.replace("\n", "\n    "), rank
    )


def plans(run: Run) -> list[Plan]:
    return [Plan.model_validate_json(path.read_text()) for path in sorted(run.folder.glob("plans/???.json"))]


def check_smaller(made: list[Plan]) -> None:
    assert all(later.layout.micro_tokens < earlier.layout.micro_tokens for earlier, later in itertools.pairwise(made))
    assert {(plan.batch_samples, plan.num_steps, plan.learning_rate, plan.layout.world_size) for plan in made} == {
        (made[0].batch_samples, made[0].num_steps, made[0].learning_rate, made[0].layout.world_size)
    }
    assert [plan.cause for plan in made[1:]] == ["out_of_memory"] * (len(made) - 1)


# Of two ranks the second one runs out. That the first one, which waits for it, is no cause: tests/launch/test_local.py.
@pytest.mark.ci
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_run_goes_on_with_smaller_micro_batches_and_the_same_batches(
    place: Place, many: str, num_ranks: int
) -> None:
    name = f"tight-{num_ranks}"
    keys = ("--gpus", str(num_ranks), "launch.restarts=3", *SEVERAL_PACKS)
    ended = place.train(name, *keys, plant=out_of_memory(2, rank=num_ranks - 1))
    assert ended.code == 0, ended.output
    run, alone = place.run(name), place.run(f"roomy-{num_ranks}")
    first, second = plans(run)
    check_smaller([first, second])
    assert ended.output.count("out of memory in stage 'train' at step 3") == 1, ended.output
    said = (
        f"plan 2: {second.layout.micro_tokens:,} tokens per micro-batch instead of "
        f"{first.layout.micro_tokens:,}, the same global batch"
    )
    assert ended.output.count(said) == 1 and "restarting from step 2" in ended.output and "error" not in ended.output
    assert run.seen() == alone.seen() and len(run.rows()) == 4
    # the same rows in the same steps; dropout is keyed by micro-batch, so that losses are near and not equal after step
    # 2
    assert run.course()[:2] == alone.course()[:2] and run.losses() == pytest.approx(alone.losses(), rel=0.05)
    assert (
        run.read("status.json")["state"] == "finished"
        and run.read("report.json")["planned"]["cause"] == "out_of_memory"
    )


@pytest.mark.slow  # three launches; what is left to a user is tested in tests/plan too
def test_a_fault_that_smaller_plans_do_not_cure_ends_with_what_to_do(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches are as asked, so that the second plan, which recomputes whole blocks, is the smallest."""
    host = read_host_facts()  # where more memory is free later on, larger plans are tried again
    monkeypatch.setattr("manyhands.launch.run.prepare.read_host_facts", lambda: host)
    keys = ("--gpus", "1", "launch.restarts=3", *SEVERAL_PACKS, "batch.micro_tokens=512")
    ended = place.train("hopeless", *keys, plant=out_of_memory(99))
    assert ended.code == 1 and ended.output.count("error: ") == 1, ended.output
    made = plans(place.run("hopeless"))
    assert [(plan.layout.micro_tokens, plan.layout.activation_checkpointing) for plan in made] == [
        (512, "none"),
        (512, "full"),
    ]
    assert "error: out of memory, and no smaller plan is left than plan 2" in ended.output
    assert "leave batch.micro_tokens to auto" in ended.output and "use a machine with more memory" in ended.output
    assert "Traceback" not in ended.output
    status = place.run("hopeless").read("status.json")
    assert (status["state"], status["cause"], status["plan"]) == ("failed", "out_of_memory", len(made))

    again = place.train("hopeless", *keys, plant=NO_VERIFY)  # by hand, the smallest plan is tried once more
    assert again.code == 0, again.output
    assert plans(place.run("hopeless"))[-1].layout.activation_checkpointing == "full"


def test_under_torchrun_the_next_start_plans_smaller(place: Place, many: str) -> None:
    """Every rank runs out of memory at step 3, and the run is started again."""
    assert many.count("start it again: the next start plans a smaller micro-batch") == 1, many
    made = plans(place.run("elsewhere"))
    assert len(made) == 2
    check_smaller(made)
    assert len(place.run("elsewhere").rows()) == 4 < NUM_STEPS


@pytest.mark.ci
@pytest.mark.slow  # nightly: the same, with processes that end; the assertions of one rank are those of two above
def test_under_torchrun_one_rank_runs_out_and_the_next_start_plans_smaller(place: Place) -> None:
    keys = ("run.yaml", "name=one-elsewhere", *SEVERAL_PACKS)
    command = ("-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "manyhands.worker", *keys)
    ended = place.call(*command, plant=out_of_memory(2))
    assert ended.code == 1 and "start it again: the next start plans a smaller micro-batch" in ended.output, (
        ended.output
    )
    assert len(plans(place.run("one-elsewhere"))) == 1
    again = place.call(*command, plant=out_of_memory(2))
    assert again.code == 0, again.output
    check_smaller(plans(place.run("one-elsewhere")))
    assert len(place.run("one-elsewhere").rows()) == 4 < NUM_STEPS


LIMIT = """
import json, torch
_before = ProgressHook.before_training
def _limited(self, state):
    # As if something else held the rest of the GPU: what is there now, and a share of what the first plan takes for a
    # micro-batch.
    first = json.loads((self.rank.folder.plans / "001.json").read_text())["memory"]["terms"]
    device = self.rank.world.device
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(device) + int(SHARE * (first["activations"] + first["logits"]))
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(device).total_memory, device)
    _before(self, state)
ProgressHook.before_training = _limited
"""


@pytest.mark.gpu
def test_a_gpu_that_really_runs_out_is_planned_for_anew(tmp_path: Path) -> None:
    """A limit on the process, the same for every plan, that the first plan's micro-batch does not fit."""
    from tests.support.tiny import write_tiny_model

    place = Place(tmp_path)
    write_tiny_model(tmp_path / "model", hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(100, 250)))} for _ in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "model": {"name": str(tmp_path / "model")},
        "task": "cpt",
        "method": {"name": "lora", "rank": 8},
        "data": {"train": "rows.jsonl", "max_length": 2048, "cache": str(tmp_path / "cache")},
        "batch": {"samples": 64},
        "stop": {"max_steps": 4, "epochs": 2},
        "evaluate": {"at_start": False, "every_steps": 0, "prompts": 0},
        "checkpoint": {"every_steps": 1},
        "parallel": {"device": "cuda", "activation_checkpointing": "none", "compile": False},
        "output": {"dir": "runs"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    ended = place.train("limited", "--gpus", "1", plant={"manyhands.worker.training": LIMIT.replace("SHARE", "0.3")})
    assert ended.code == 0, ended.output
    made = plans(place.run("limited"))
    assert len(made) >= 2 and made[0].cause == "first", ended.output
    check_smaller(made)
    assert ended.output.count("out of GPU memory in stage") == len(made) - 1, ended.output
    assert len(place.run("limited").rows()) == 4 and place.run("limited").read("status.json")["state"] == "finished"
    print(ended.output)
