"""What ends a run before its last step, evaluation on ragged ends, and the best checkpoint: through the real loop."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import MAX_TOKENS
from tests.e2e.runs import NO_VERIFY, NUM_STEPS, Place, at_step


@pytest.fixture(scope="module")
def stopped(place: Place, many: str) -> Place:
    return place


def test_max_tokens_is_never_passed_on_any_number_of_processes(stopped: Place) -> None:
    for name in ("max-tokens", "max-tokens-2"):
        run = stopped.run(name)
        report = run.read("report.json")["measured"]
        tokens = sum(row["num_tokens"] for row in run.rows())
        assert report["tokens"] == tokens <= MAX_TOKENS < tokens + 8 * 100
        assert f"stop.max_tokens = {MAX_TOKENS} would be passed" in report["stop_reason"]
    assert stopped.run("max-tokens").seen() == stopped.run("max-tokens-2").seen()


def test_evaluation_of_ragged_rows_is_the_same_on_two_processes(stopped: Place) -> None:
    one, two = stopped.run("max-tokens").rows("evaluation"), stopped.run("max-tokens-2").rows("evaluation")
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for mine, other in zip(one, two, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5) and mine["accuracy"] == pytest.approx(
            other["accuracy"]
        )
        assert [mine[key] for key in ("num_samples", "num_tokens", "num_loss_tokens", "samples")] == [
            other[key] for key in ("num_samples", "num_tokens", "num_loss_tokens", "samples")
        ]


def test_time_is_up_on_all_ranks_at_once(stopped: Place) -> None:
    run = stopped.run("max-time")
    assert run.read("status.json")["reason"] == "stop.max_time_s = 0.001 is reached"
    assert len(run.rows()) == 1 and run.steps_saved() == [1] and run.evaluations()[-1][0] == 1


def test_patience_counts_evaluations_without_a_lower_loss(stopped: Place) -> None:
    run = stopped.run("patience")
    assert "3 evaluations in a row did not lower the validation loss" in run.read("status.json")["reason"]
    assert len(run.rows()) == 6 < NUM_STEPS and len({loss for _, loss in run.evaluations()}) == 1


def test_the_best_checkpoint_is_kept_and_exported(stopped: Place) -> None:
    import torch
    from safetensors.torch import load_file

    run = stopped.run("best")
    losses = dict(run.evaluations())
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 60 and losses[best] < 0.97 * losses[60], "it overfits"
    assert run.read("report.json")["best"] == {"step": best, "loss": losses[best]}
    assert best in run.steps_saved() and run.steps_saved()[-1] == 60
    shards = {}
    for path in (run.folder / f"checkpoints/step-{best:06d}").glob("*.safetensors"):
        shards |= load_file(path)
    saved = {
        name.removeprefix("model."): tensor
        for name, tensor in shards.items()
        if "lora_" in name and name.startswith("model.")
    }
    adapter = load_file(run.folder / "adapter/adapter_model.safetensors")
    assert len(saved) == len(adapter) == 42
    for name, tensor in adapter.items():
        (match,) = [
            other
            for key, other in saved.items()
            if key.split(".weight")[0] == name.removeprefix("base_model.model.").split(".weight")[0]
        ]
        assert torch.equal(tensor, match)


def test_where_training_never_helped_the_best_trained_step_is_exported(stopped: Place) -> None:
    run = stopped.run("never-better")
    assert run.read("report.json")["best"]["step"] == 2
    assert run.steps_saved() == [2] and "adapter/adapter_model.safetensors" in run.files()


@pytest.mark.slow
def test_the_file_stop_saves_and_ends_and_a_damaged_checkpoint_is_passed_over(place: Place) -> None:
    """Both on the way of one run, whose losses are those of a run left alone."""
    keys = ("checkpoint.keep_last=5", "checkpoint.every_steps=2")
    left_alone = place.train("left-alone", "--gpus", "2", *keys, plant=NO_VERIFY)
    assert left_alone.code == 0, left_alone.output
    act = "self.rank.folder.stop_file.touch()\nself.rank.process.look_again_at = 0.0"
    stopped = place.train("by-file", "--gpus", "2", *keys, plant=at_step(6, act, rank=0))
    run = place.run("by-file")
    assert stopped.code == 130 and "STOP: the run has ended, saved at step 7; the same command" in stopped.output
    assert "error" not in stopped.output and run.read("status.json")["reason"] == "STOP"
    assert run.steps_saved() == [2, 4, 6, 7] and not (run.folder / "STOP").exists()

    (run.folder / "STOP").touch()  # for a launch that is over
    (file,) = (run.folder / "checkpoints" / "step-000007").glob("shard-00002-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = place.train("by-file", "--gpus", "2", *keys, plant=NO_VERIFY)
    assert again.code == 0, again.output
    warning = "it is kept as step-000007.damaged. The run resumes from step-000006: 1 step is trained again"
    assert again.output.count(warning) == 1 and "resumed after step 6 from step-000006" in again.output
    assert run.course() == place.run("left-alone").course()
    assert (run.folder / "checkpoints" / "step-000007.damaged").is_dir()
