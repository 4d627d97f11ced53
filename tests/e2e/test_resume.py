"""A run that was broken off and started again does what it would have done: bit for bit at the same number of
processes, the same rows at another. Real processes that are really killed are in ``test_endings``; here it is every
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tests.e2e.runs import NUM_STEPS, Ended, Place, Run, Spec

pytestmark = pytest.mark.slow  # whole runs in processes of their own

MOMENTS = (("step", 1), ("step", 6), ("saved", 8), ("saving", 12))
MORE_MOMENTS = (("step", 4), ("step", 9), ("step", 12), ("saved", 12), ("saving", 4))
FSDP = ("parallel.strategy=fsdp",)
PLAIN = ("method.dropout=0",)  # dropout is keyed by rank: another number of ranks draws others
RESIZED = {"grown": ((1, ()), (2, ())), "shrunk": ((2, ()), (1, ()))}  # name: (ranks and strategy before, and after)
MORE_RESIZED = {"sharded": ((2, ("parallel.strategy=ddp",)), (2, FSDP)), "gathered": ((2, FSDP), (1, ()))}


def broken_and_resumed(ranks: int, moments: Iterable[tuple[str, int]], *more: str) -> list[Spec]:
    names = [(f"{where}-{step}-{ranks}{'-fsdp' if more else ''}", where, step) for where, step in moments]
    return [
        spec
        for name, where, step in names
        for spec in (Spec(ranks, name, more, {where: step}), Spec(ranks, name, more))
    ]


def resized(layouts: Mapping[str, Any]) -> list[Spec]:
    specs = []
    for name, ((ranks, more), (ranks_after, more_after)) in layouts.items():
        specs += [Spec(ranks, name, PLAIN + more, {"step": 7}), Spec(ranks_after, name, PLAIN + more_after)]
    return specs


CONSTANT = ("schedule.name=constant", "schedule.warmup_ratio=0")
LONGER = {"longer-1": (1, CONSTANT), "longer-2": (2, CONSTANT), "longer-cosine": (1, ())}


def longer() -> list[Spec]:
    """Finished after 3 steps, stopped in the fifth of 6, finished after 12; and straight to 12."""
    specs = []
    for name, (ranks, more) in LONGER.items():
        specs += [Spec(ranks, name, (*more, "stop.max_steps=3"))]
        specs += [Spec(ranks, name, (*more, "stop.max_steps=6"), {"step": 5})]
        specs += [Spec(ranks, name, more), Spec(ranks, f"{name}-straight", more)]
    return specs


@pytest.fixture(scope="module")
def resumed(place: Place) -> Place:
    """All quick runs of this module, in one set of processes."""
    references = [Spec(1, "single"), Spec(2, "ddp"), Spec(1, "plain", PLAIN)]
    broken = [*broken_and_resumed(1, MOMENTS), *broken_and_resumed(2, [("step", 7)]), *resized(RESIZED)]
    place.many(*references, *broken, *longer())
    return place


@pytest.fixture(scope="module")
def resumed_more(resumed: Place) -> Place:
    """Of other moments and layouts, which are nightly."""
    specs = [Spec(2, "fsdp", FSDP), *broken_and_resumed(2, [("step", 7)], *FSDP), *resized(MORE_RESIZED)]
    specs += [Spec(1, "twice", (), {"saving": 8}), Spec(1, "twice", (), {"step": 6}), Spec(1, "twice")]
    resumed.many(*specs, *broken_and_resumed(2, [("step", 2), ("saved", 8)]), *broken_and_resumed(1, MORE_MOMENTS))
    return resumed


def check_same(place: Place, name: str, reference: str) -> None:
    run, other = place.run(name), place.run(reference)
    assert run.course() == other.course()
    assert run.seen() == other.seen() and run.evaluations() == other.evaluations()
    assert run.steps_saved() == other.steps_saved() and run.files() >= {
        "report.json",
        "adapter/adapter_model.safetensors",
    }
    adapters = [(each.folder / "adapter/adapter_model.safetensors").read_bytes() for each in (run, other)]
    assert adapters[0] == adapters[1]


def check_resized(place: Place, name: str) -> None:
    run, plain = place.run(name), place.run("plain")
    assert run.seen() == plain.seen()
    assert run.losses() == pytest.approx(plain.losses(), rel=1e-5)
    assert run.read("plans/002.json")["cause"] == ("resume" if name == "sharded" else "resize")
    assert [step for step, _ in run.evaluations()] == [step for step, _ in plain.evaluations()]
    assert [loss for _, loss in run.evaluations()] == pytest.approx([loss for _, loss in plain.evaluations()], rel=1e-5)


def test_the_reference_is_a_run_that_learns_with_clipping_in_some_steps(resumed: Place) -> None:
    course = resumed.run("single").course()
    assert [step for step, _, _ in course] == list(range(1, NUM_STEPS + 1))
    assert course[-1][1] < 0.9 * course[0][1]
    assert min(norm for _, _, norm in course) < 1.5 < max(norm for _, _, norm in course)
    plain = resumed.run("plain").losses()
    assert max(abs(a - b) for a, b in zip(plain, resumed.run("single").losses(), strict=True)) > 1e-3, "dropout acts"


@pytest.mark.parametrize(("where", "step"), MOMENTS)
def test_broken_off_at_any_moment_one_process_goes_on_bit_for_bit(resumed: Place, where: str, step: int) -> None:
    check_same(resumed, f"{where}-{step}-1", "single")


def test_two_processes_go_on_bit_for_bit(resumed: Place) -> None:
    check_same(resumed, "step-7-2", "ddp")


@pytest.mark.parametrize("name", RESIZED)
def test_at_another_number_of_processes_the_same_rows_are_in_the_same_steps(resumed: Place, name: str) -> None:
    check_resized(resumed, name)


@pytest.mark.parametrize("name", LONGER)
def test_a_run_that_became_longer_twice_is_the_straight_one_where_the_schedule_is(resumed: Place, name: str) -> None:
    run, straight = resumed.run(name), resumed.run(f"{name}-straight")
    assert [step for step, _, _ in run.course()] == list(range(1, NUM_STEPS + 1)) and run.seen() == straight.seen()
    assert (run.course() == straight.course()) == (name != "longer-cosine")
    adapters = [(each.folder / "adapter/adapter_model.safetensors").read_bytes() for each in (run, straight)]
    assert (adapters[0] == adapters[1]) == (name != "longer-cosine")
    report, status = run.read("report.json"), run.read("status.json")
    assert report["measured"]["steps"] == report["planned"]["steps"] == status["step"] == NUM_STEPS
    assert status["state"] == "finished" and run.read("plans/001.report.json")["measured"]["steps"] == 3
    assert [run.read(f"plans/{number:03}.json")["num_steps"] for number in (1, 2, 3)] == [3, 6, 12]


def test_torchrun_and_our_own_launcher_give_the_same_losses(resumed: Place, whole: tuple[Ended, Run]) -> None:
    assert resumed.run("ddp").course() == whole[1].course()


@pytest.mark.ci
def test_more_moments(resumed_more: Place) -> None:
    for where, step in MORE_MOMENTS:
        check_same(resumed_more, f"{where}-{step}-1", "single")
    for where, step in (("step", 2), ("saved", 8)):
        check_same(resumed_more, f"{where}-{step}-2", "ddp")
    check_same(resumed_more, "step-7-2-fsdp", "fsdp")


@pytest.mark.ci
def test_broken_off_while_saving_and_once_more_before_that_step(resumed_more: Place) -> None:
    check_same(resumed_more, "twice", "single")
    assert {"plans/001.json", "plans/002.json", "plans/003.json"} <= resumed_more.run("twice").files()


@pytest.mark.ci
@pytest.mark.parametrize("name", MORE_RESIZED)
def test_under_another_strategy_the_same_rows_are_in_the_same_steps(resumed_more: Place, name: str) -> None:
    check_resized(resumed_more, name)
