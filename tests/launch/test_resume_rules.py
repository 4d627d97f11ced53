"""What a start does with a folder that is there already: goes on, stops, refuses; and never loses anything."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from pydantic_core import from_json, to_json

from manyhands.config.schema import digest_json
from manyhands.core.errors import OUT_OF_MEMORY, UserError
from manyhands.launch.local.start import start
from manyhands.launch.run import prepare as prepare_module
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.lock import FolderLock
from manyhands.launch.run.prepare import prepare_run
from manyhands.launch.run.resume import describe_run, refuse_other_run
from manyhands.planner.types import OutOfMemory
from tests.launch.builders import make_config, make_plan
from tests.support.plans import explain_why


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Facts and planner in place of the real ones; ``world.plan``: what the next plan says, ``world.run``: a folder."""
    state = SimpleNamespace(plan={}, world_size=2, run=RunFolder(tmp_path / "runs" / "demo"), reports=[])

    def gather_facts(config, world_size=None, local_world_size=None, host=None, group=None, report=print):
        if state.plan is None:
            raise UserError("no such file")
        return SimpleNamespace(world_size=world_size or state.world_size, model=None)

    def plan(config, facts, *, number=1, cause="first", before=None, found=None):
        state.found = found
        assert before is None or before.number == number - 1
        return make_plan(facts.world_size, number=number, cause=cause, config_digest=config.digest, **state.plan)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("manyhands.launch.run.prepare.gather_facts", gather_facts)
    monkeypatch.setitem(sys.modules, "manyhands.planner.search", SimpleNamespace(plan=plan))
    monkeypatch.setattr("manyhands.launch.run.prepare.rehearse", lambda config, plan: None)
    monkeypatch.setattr("manyhands.launch.run.prepare.refuse_unmatched", lambda config, plan, model: None)
    return state


def prepare(**changes):
    """One start, up to the launch; frees the lock as the end of the process would."""
    options = {name: changes.pop(name) for name in ("fresh", "dry_run", "world_size") if name in changes}
    prepared = prepare_run(make_config(**changes), **options)
    prepared.release()
    return prepared


def pretend_checkpoint(folder: RunFolder, step: int) -> None:
    path = folder.checkpoints / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    folder.write_status("running")


def carry(folder: RunFolder, step: int, config, plan) -> Path:
    """A checkpoint as a run of ``config`` and ``plan`` writes it."""
    pretend_checkpoint(folder, step)
    path = folder.checkpoints / f"step-{step:06d}"
    (path / "manifest.json").write_text(json.dumps({"extra": describe_run(config, plan)}))
    return path


@pytest.mark.parametrize(
    ("keys", "computed", "detail"),
    [
        ({"optimizer.learning_rate": 0.5}, {}, "optimizer.learning_rate: 0.5 -> "),
        ({"seed": 7}, {}, "seed: 7 -> "),
        ({"data.max_length": 64}, {}, "data.max_length: 64 -> "),
        ({"model.revision": "v2"}, {}, "model.revision: 'v2' -> "),
        ({"batch.samples": 3}, {}, "batch.samples: 3 -> "),
        ({}, {"data_content": "other tokens"}, "data_content"),
        ({}, {"data_digest": "other rows"}, "data_digest"),
        ({}, {"learning_rate": 0.5}, "learning_rate"),
        ({}, {"num_steps": 99}, "num_steps"),
        ({}, {"model_files": {"config.json": "1" * 64}}, "model_files"),
    ],
)
def test_a_checkpoint_of_another_run_is_not_resumed_from(world, keys, computed, detail):
    """Of other keys, or of the same that have computed something else."""
    plan = prepare().plan
    path = carry(world.run, 5, make_config(**keys), plan.model_copy(update=computed))
    with pytest.raises(UserError, match="the checkpoint is of another run") as caught:
        prepare()
    assert Path(caught.value.where).resolve() == path and caught.value.details[0].startswith(detail)
    assert world.run.newest_plan_number() == 1


def test_a_checkpoint_of_this_run_is_resumed_from_under_another_name_and_at_another_place(world):
    plan = prepare().plan
    carry(world.run, 5, make_config(name="before", **AT_WORK, **{"parallel.gpus": 4}), plan)
    assert prepare().resume


@pytest.mark.parametrize(
    ("number", "has_begun", "made_from"),
    [(2, False, "run.json"), (2, True, "run.json"), (1, True, "run.json"), (1, True, "001.run.json")],
    ids=["newest, only planned", "newest, no checkpoint", "in place of its own", "before other limits"],
)
def test_a_plan_of_another_run_is_refused_at_every_start(world, number, has_begun, made_from):
    prepare()
    if has_begun:
        world.run.write_status("failed", plan=number, cause="out_of_memory")
    if made_from != "run.json":
        prepare(**{"stop.epochs": 2.0, "log.every_steps": 3})
    path = world.run.plans / f"{number:03d}.json"
    path.write_text(make_plan(number=number, config_digest=make_config(name="other", seed=7).digest).model_dump_json())
    before = files_in(world.run.path)
    with pytest.raises(UserError, match="the plan is of another run") as caught:
        prepare()
    assert caught.value.where == str(path.relative_to(Path.cwd())) and caught.value.why.endswith(made_from)
    assert files_in(world.run.path) == before


def test_plans_before_other_keys_and_a_start_that_broke_off_are_the_runs_own(world, monkeypatch):
    """Keys as they are written, floats and other alphabets too; an earlier version has written one key less."""
    text = make_config(**{"optimizer.eps": 1e-08, "data.train": "größe.jsonl"})
    assert digest_json(to_json(from_json(text.model_dump_json(indent=2)))) == text.digest
    prepare(**{"log.every_steps": 2})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunFolder, "write_plan", Mock(side_effect=KeyboardInterrupt))
        prepare(**{"log.every_steps": 3})
    for every in (4, 2, 2, 5):
        prepare(**{"log.every_steps": every})
    assert [plan.number for plan in world.run.read_plans()] == [1, 2, 3, 4, 5]
    older = json.loads(world.run.run_json.read_text())
    del older["submit"]
    plan = world.run.read_plan().model_copy(update={"config_digest": digest_json(to_json(older))})
    world.run.run_json.write_text(json.dumps(older, indent=2))
    (world.run.plans / "005.json").write_text(plan.model_dump_json())
    assert prepare(**{"log.every_steps": 5}).plan.number == 6


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_data_that_is_gone_is_no_other_run(world, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    config = make_config()
    before = config.model_copy(update={"data": config.data.model_copy(update={"train": str(rows)})})
    now = config.model_copy(update={"data": config.data.model_copy(update={"train": "rows.jsonl"})})
    with pytest.raises(UserError, match="another run named"):
        refuse_other_run(before, now, "runs/demo")
    rows.unlink()
    with pytest.raises(UserError, match="no such data file") as caught:
        refuse_other_run(before, now, "runs/demo")
    assert caught.value.where == str(rows) and "data.train" in caught.value.fix


def test_a_first_start_writes_run_and_plan(world):
    prepared = prepare()
    assert (prepared.plan.number, prepared.plan.cause, prepared.resume, prepared.finished) == (1, "first", False, False)
    assert files_in(world.run.path) == {".lock", "run.json", "plan.json", "plans/001.json"}
    assert world.run.read_config() == make_config() and world.run.read_plan() == prepared.plan
    assert json.loads(world.run.plan_json.read_text()) == {"newest": "plans/001.json"}


AT_WORK = {
    "data.workers": 1,
    "data.image_cache_gb": 1.0,
    "data.image_memory_gb": 0.5,
    "data.cache_features": False,
    "data.feature_cache_gb": 1.0,
}


def test_a_second_start_resumes_on_the_same_or_another_number_of_gpus(world):
    prepare()
    pretend_checkpoint(world.run, 5)
    again = prepare(**AT_WORK)
    assert (again.plan.number, again.plan.cause, again.resume) == (2, "resume", True)
    world.world_size = 4
    wider = prepare(**{"parallel.gpus": 4})
    assert (wider.plan.number, wider.plan.cause, wider.resume) == (3, "resize", True)
    assert world.run.read_config().parallel.gpus == 4
    assert json.loads((world.run.plans / "002.run.json").read_text())["parallel"]["gpus"] == "auto", (
        "the replaced run.json is kept"
    )


def test_when_checkpoints_are_made_and_how_many_are_kept_may_change(world):
    """As errors of a full disk, and of a rollback before the first checkpoint, advise."""
    prepare()
    pretend_checkpoint(world.run, 5)
    for key in ("checkpoint.keep_last", "checkpoint.every_steps", "checkpoint.per_epoch"):
        assert prepare(**{key: 1}).resume


def test_half_written_files_of_a_killed_launch_are_gone_after_the_next_start(world):
    prepare()
    verify = world.run.path / "verify"
    verify.mkdir()
    for folder in (world.run.path, world.run.plans, verify):
        (folder / ".status.json.4711.tmp").write_text('{"sta')
    prepare()
    assert not [name for name in files_in(world.run.path) if name.endswith(".tmp")]


def test_after_a_launch_that_ran_out_of_memory_the_next_start_plans_smaller(world):
    first = prepare().plan
    measured = {"needed": 5, "available": 4}
    world.run.write_failed(UserError("out of GPU memory", kind=OUT_OF_MEMORY, data=measured), first)
    small = OutOfMemory(
        number=1,
        layout=make_plan(full_micro_tokens=2048).layout,
        estimated_bytes=1,
        limit=2,
    )
    world.plan = {"ran_out": small, "micro_tokens": 1024}
    assert prepare().plan.cause == "out_of_memory" and world.found.model_dump() == measured
    world.run.write_status("failed", reason="something else", plan=2)
    assert prepare().plan.cause == "first"
    world.run.write_failed(UserError("out of GPU memory", kind=OUT_OF_MEMORY), first)  # of an older plan
    assert prepare().plan.cause == "first"
    world.run.write_failed(UserError("out of GPU memory", kind=OUT_OF_MEMORY), make_plan(number=4))
    world.plan = {"ran_out": small, "batch_samples": 7}
    with pytest.raises(UserError, match="this launch would not continue the run as it was"):
        prepare()  # the global batch stays, or it is another run


def test_killed_before_the_first_checkpoint_it_starts_over(world):
    prepare()
    world.run.write_status("running")
    again = prepare()
    assert (again.plan.number, again.plan.cause, again.resume) == (2, "first", False)


def test_a_finished_run_says_so_and_ends_well(world, capsys):
    prepare()
    world.run.write_status("finished")
    before = files_in(world.run.path)
    assert start(make_config()) == 0
    assert "is finished; nothing to do" in capsys.readouterr().out
    assert files_in(world.run.path) == before


def test_a_run_that_another_launch_finished_while_its_lock_was_waited_for_is_not_done_again(world, monkeypatch, capsys):
    prepare()
    pretend_checkpoint(world.run, 4)
    before = files_in(world.run.path)

    def take_lock(folder: RunFolder, report) -> FolderLock:
        folder.write_status("finished")
        return FolderLock(folder, report)

    monkeypatch.setattr("manyhands.launch.local.start.FolderLock", take_lock)
    assert start(make_config()) == 0
    assert "is finished; nothing to do" in capsys.readouterr().out and files_in(world.run.path) == before
    FolderLock(world.run).release()  # nobody holds it


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_while_it_prepares_a_start_says_so_and_leaves_nothing(world, monkeypatch, number, code):
    def gather_facts(config, **options):
        try:
            signal.raise_signal(number)
        except Exception:
            pytest.fail("what prepares may answer errors of its own, and must not take this for one")

    monkeypatch.setattr("manyhands.launch.run.prepare.gather_facts", gather_facts)
    before = signal.getsignal(number)
    with pytest.raises(UserError) as stopped:
        start(make_config())
    assert str(stopped.value).startswith(f"{number.name}: stopped while data and plan were being prepared")
    assert stopped.value.exit_code == code and not world.run.path.exists() and signal.getsignal(number) is before


def test_another_run_in_the_folder_is_refused_with_the_changed_keys(world):
    prepare()
    pretend_checkpoint(world.run, 5)
    with pytest.raises(UserError) as refused:
        prepare(**{"optimizer.learning_rate": 0.001, "seed": 7, "parallel.gpus": 4, "log.every_steps": 5})
    assert refused.value.details == ("seed: 0 -> 7", "optimizer.learning_rate: 'auto' -> 0.001")
    assert "--fresh" in str(refused.value) and "name=NEW method.adapter=runs/demo" in refused.value.fix
    assert world.run.read_config() == make_config()


def end_after(world, step: int, reason: str = "", **keys: object) -> None:
    """A finished run of ``step`` steps with its report and exports, as its plan has them."""
    world.plan = {"num_steps": step}
    prepare(**keys)
    pretend_checkpoint(world.run, step)
    world.run.write_status("finished", step=step, reason=reason or f"all {step} steps are done")
    for name in ("report.json", "report.md", "report.html", "adapter/weights", "merged/weights", "gguf-q8_0/weights"):
        (world.run.path / name).parent.mkdir(exist_ok=True)
        (world.run.path / name).write_text("{}")


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_becomes_longer_by_its_limits(world, finished, capsys):
    end_after(world, 3, **{"stop.max_steps": 3})
    if not finished:
        world.run.write_status("interrupted", reason="SIGINT")
    before = files_in(world.run.path)
    world.plan = {"num_steps": 6, "warmup_steps": 0}
    assert start(make_config(**{"stop.max_steps": 6}), dry_run=True) == 0
    assert "nothing was written" in capsys.readouterr().out and files_in(world.run.path) == before
    longer = prepare(**{"stop.max_steps": 6})
    assert (longer.finished, longer.resume, longer.plan.number, longer.plan.cause) == (False, True, 2, "resume")
    [why] = explain_why(longer.plan, "longer")
    assert why.startswith("longer: stop.max_steps: 3 -> 6: 6 steps, of which 3 are done")
    assert world.run.read_config().stop.max_steps == 6 and not world.run.is_finished
    there = files_in(world.run.path)
    assert {"plans/001.run.json", "adapter/weights"} <= there
    if finished:  # what was said of the shorter run does not pass for the longer one's
        assert "report.json" not in there and {f"plans/001.report.{kind}" for kind in ("json", "md", "html")} <= there
        assert {
            "merged-step-000003/weights",
            "gguf-q8_0-step-000003/weights",
        } <= there and "merged/weights" not in there
        assert "merged-step-000003" in capsys.readouterr().out
    again = prepare(**{"stop.max_steps": 6})
    assert again.resume and not again.finished and not explain_why(again.plan, "longer")


SHORTER = "would make this run shorter"
SAME = "would not be longer"


@pytest.mark.parametrize(
    ("before", "now", "planned", "reason", "refusal"),
    [
        ({"max_steps": 3}, {"max_steps": 2}, 2, "", SHORTER),
        ({"epochs": 2.0}, {"epochs": 1.0}, 1, "", SHORTER),
        ({"epochs": 2.0}, {"epochs": 2.0, "max_steps": 2}, 2, "", SHORTER),
        ({"max_tokens": 100}, {"max_tokens": 99}, 3, "stop.max_tokens = 100 would be passed", SHORTER),
        ({"max_time_s": 9.0}, {"max_time_s": 8.0, "epochs": 3.0}, 9, "stop.max_time_s = 9 is reached", SHORTER),
        ({}, {"patience": 3}, 3, "", SHORTER),
        ({"max_steps": 3}, {"max_steps": 6}, 3, "", SAME),  # stop.epochs ends it
        ({"max_steps": 3}, {"max_steps": 3, "epochs": 9.0}, 3, "", SAME),
        ({"patience": 2}, {"patience": 3}, 3, "", SAME),  # all its steps are done
        ({"max_tokens": 100}, {"max_tokens": 100, "epochs": 2.0}, 6, "stop.max_tokens = 100 would be passed", SAME),
        ({"max_steps": 3}, {"max_steps": None}, 6, "", None),
        ({"max_steps": 3}, {"max_steps": 5, "epochs": 2.0}, 5, "", None),
        ({"epochs": 1.0}, {"max_steps": 5, "epochs": 2.0}, 5, "", None),
        ({"max_tokens": 100}, {"max_tokens": 200}, 9, "stop.max_tokens = 100 would be passed", None),
        ({"max_time_s": 9.0}, {}, 9, "stop.max_time_s = 9 is reached", None),
        ({"patience": 2}, {"patience": 4}, 9, "2 evaluations in a row did not lower the loss (stop.patience)", None),
    ],
)
def test_limits_only_grow(world, before, now, planned, reason, refusal):
    early = planned if reason and refusal is None else 3
    end_after(world, 3, reason, **{f"stop.{key}": value for key, value in before.items()})
    if early != 3:  # ended before all of its planned steps
        plan = world.run.plans / "001.json"
        plan.write_text(plan.read_text().replace('"num_steps": 3', f'"num_steps": {early}'))
    world.plan = {"num_steps": planned, "warmup_steps": 0}
    limits, files = {f"stop.{key}": value for key, value in now.items()}, files_in(world.run.path)
    if refusal is None:
        assert prepare(**limits).resume and not world.run.is_finished
        return
    with pytest.raises(UserError, match=refusal) as refused:
        prepare(**limits)
    assert refused.value.details and refused.value.details[0].startswith("stop.")
    assert ("restore the keys" if refusal == SHORTER else "method.adapter=runs/demo") in refused.value.fix
    assert files_in(world.run.path) == files and world.run.is_finished


def test_a_finished_run_without_a_checkpoint_names_a_new_run(world):
    end_after(world, 3, **{"method.name": "full"})
    shutil.rmtree(world.run.checkpoints)
    world.plan = {"num_steps": 6}
    with pytest.raises(UserError, match="no checkpoint to resume from") as refused:
        prepare(**{"stop.epochs": 2.0, "method.name": "full"})
    assert "name=NEW model.name=runs/demo" in refused.value.fix and world.run.is_finished


def test_a_run_whose_folder_was_renamed_is_named_as_it_was(world):
    """With the old name alone a new run would start, in a new folder."""
    started = prepare()
    started.folder.write_status("interrupted")
    started.folder.path.rename(started.folder.path.with_name("moved"))
    with pytest.raises(UserError, match="another run named 'demo'") as caught:
        prepare(name="moved")
    assert "rename the folder to demo" in caught.value.fix
    started.folder.path.with_name("moved").rename(started.folder.path)
    assert prepare().plan.number == 2


def test_a_dry_run_can_be_planned_anew_with_other_keys(world, capsys):
    assert start(make_config(), dry_run=True) == 0
    assert "the plan" in capsys.readouterr().out
    assert files_in(world.run.path) == {".lock", "run.json", "plan.json", "plans/001.json"}
    assert prepare(**{"stop.epochs": 2.0}).plan.number == 2
    assert world.run.read_config().stop.epochs == 2.0


def test_fresh_takes_a_new_folder_and_deletes_nothing(world):
    prepare()
    pretend_checkpoint(world.run, 5)
    second, third = prepare(fresh=True), prepare(fresh=True, **{"stop.epochs": 2.0})
    assert [p.folder.path.name for p in (second, third)] == ["demo-2", "demo-3"]
    assert second.config.name == "demo-2" and second.plan.cause == "first"
    assert world.run.newest_step() == 5
    assert not prepare(name="demo-2").resume, "name=demo-2 finds that run again"


def test_a_folder_that_is_no_run_is_not_touched(world):
    world.run.path.mkdir(parents=True)
    (world.run.path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(UserError, match="contains no run"):
        prepare()
    assert files_in(world.run.path) == {"thesis.tex"}


@pytest.mark.parametrize("was_there", [False, True])
def test_a_start_that_fails_leaves_no_folder(world, was_there):
    """Nor the one that runs are in, unless it was there."""
    if was_there:
        world.run.path.parent.mkdir()
    world.plan = None
    with pytest.raises(UserError, match="no such file"):
        prepare()
    assert world.run.path.parent.exists() == was_there and not world.run.path.exists()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("/proc/nowhere", "cannot be written"),  # read-only, for root too
        ("/sys/kernel", "cannot be written"),
        ("file", "Not a directory"),
        ("file/below", "Not a directory"),
        ("long" * 80, "File name too long"),
        ("deep/" * 1000, "File name too long"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_cannot_be_written_is_named(world, tmp_path, output, said, fresh):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="folder cannot be written") as refused:
        prepare(fresh=fresh, **{"output.dir": output})
    assert said in str(refused.value) and "output.dir" in refused.value.fix and refused.value.where.endswith("demo")


def test_a_folder_that_turns_read_only_while_it_is_planned_is_named(world, monkeypatch):
    def refuse(path, text):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("manyhands.launch.run.folder.write_atomically", refuse)
    with pytest.raises(UserError, match="folder cannot be written") as refused:
        prepare()
    assert "Permission denied" in refused.value.why and "run.json" in refused.value.why


@pytest.mark.parametrize("damage", ["{", "null", "[]", '{"number": 3}', "\x00", "[" * 100_000])
def test_a_damaged_plan_is_named_and_nothing_is_touched(world, damage):
    prepare()
    pretend_checkpoint(world.run, 5)
    (world.run.plans / "001.json").write_text(damage)
    before = files_in(world.run.path)
    with pytest.raises(UserError, match="plan is damaged") as refused:
        prepare()
    assert refused.value.where.endswith("plans/001.json") and "--fresh" in refused.value.fix
    world.run.write_status("finished")
    with pytest.raises(UserError, match="plan is damaged"):
        prepare()
    assert files_in(world.run.path) == before


def test_a_plan_that_is_gone_is_named_and_its_pointer_is_not_needed(world):
    prepare()
    pretend_checkpoint(world.run, 5)
    world.run.plan_json.unlink()
    world.run.status_json.write_text("[1]")
    assert prepare().plan.number == 2
    world.run.plan_json.write_text('{"newest": "../../../etc/passwd"}')
    assert world.run.read_plan().number == 2
    for path in world.run.plans.glob("*.json"):
        path.unlink()
    with pytest.raises(UserError, match="has no plan") as refused:
        prepare()
    assert "removed" in refused.value.why


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"data_digest": "other"}, "the data"),
        ({"data_content": "other"}, "the tokens differ"),
        ({"batch_samples": 16}, "start it as before"),
        ({"compute_dtype": "bfloat16"}, "start it as before"),
    ],
)
def test_a_resume_that_would_compute_something_else_is_refused(world, change, word):
    prepare()
    pretend_checkpoint(world.run, 5)
    world.plan = change
    with pytest.raises(UserError, match="would not continue the run as it was") as refused:
        prepare()
    assert word in str(refused.value) and next(iter(change)) in refused.value.details[0]
    assert world.run.newest_plan_number() == 1


def test_a_plan_that_names_neither_tokens_nor_files_is_compared_by_the_rest(world):
    world.plan = {"data_content": "", "model_files": {}}
    prepare()
    pretend_checkpoint(world.run, 5)
    world.plan = {"data_content": "new", "model_files": BASE}
    assert prepare().plan.cause == "resume"


BASE = {"config.json": "c" * 64, "model.safetensors": "a" * 64}


@pytest.mark.parametrize(
    ("now", "keeps_base", "named"),
    [
        (BASE | {"model.safetensors": "b" * 64}, True, "model.safetensors: aaaaaaaaaaaa -> bbbbbbbbbbbb"),
        (BASE | {"config.json": "d" * 64}, False, "config.json: cccccccccccc -> dddddddddddd"),
        ({"config.json": "c" * 64}, True, "model.safetensors: aaaaaaaaaaaa -> none"),
        (BASE | {"model.safetensors": "b" * 64}, False, None),
    ],
)
def test_a_resume_on_another_base_model_names_the_file(world, now, keeps_base, named):
    """Where all weights are trained the checkpoint has them: only the configuration has to be the same."""
    world.plan = {"model_files": BASE, "keeps_base": keeps_base}
    prepare()
    pretend_checkpoint(world.run, 5)
    world.plan = {"model_files": now, "keeps_base": keeps_base}
    if named is None:
        assert prepare().resume
        return
    with pytest.raises(UserError, match="would not continue the run as it was") as refused:
        prepare()
    assert refused.value.details == (named,) and "base model's files have changed" in refused.value.why


def test_two_launches_at_once_are_refused_and_the_holder_named(world):
    held = prepare_run(make_config())
    code = (
        "import sys; from manyhands.launch.run.lock import FolderLock, RunFolder\n"
        "try: FolderLock(RunFolder(sys.argv[1]))\n"
        "except Exception as error: print(error)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    text = subprocess.run(
        [sys.executable, "-c", code, str(world.run.path)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "already running" in text and f"process {os.getpid()} on" in text
    held.release()
    assert prepare().plan.number == 2


def test_two_fresh_starts_at_once_take_two_folders(world):
    """The first one prepares its data, which may take long, and has written nothing yet."""
    world.run.path.mkdir(parents=True)
    held = FolderLock(world.run)
    assert prepare(fresh=True).config.name == "demo-2"
    held.release()


def test_a_start_that_fails_leaves_its_folder_to_another_that_came_meanwhile(world, monkeypatch):
    def fail(*_, **__):
        (world.run.path / "plans").mkdir()
        raise UserError("no such data file")

    listed = Path.iterdir
    monkeypatch.setattr(prepare_module, "gather_facts", fail)
    monkeypatch.setattr(Path, "iterdir", lambda path: (p for p in listed(path) if p.name != "plans"))  # not there yet
    with pytest.raises(UserError, match="no such data file"):
        prepare()


def test_under_another_launcher_its_world_size_counts(world):
    assert prepare(world_size=8).plan.layout.world_size == 8


def test_train_under_torchrun_is_refused(world, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="starts the processes itself"):
        start(make_config())
