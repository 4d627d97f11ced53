"""Effects of ``name``, ``evaluate.*``, ``checkpoint.*``, ``log.*`` and ``output.*``: what a run says and leaves
behind.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from manyhands.checkpoint.staging import Staging
from manyhands.core.remote import RemoteError, RemoteFolder
from manyhands.infer import sample_prompts
from manyhands.launch.run import prepare
from manyhands.metrics import trackers
from manyhands.metrics.trackers import TrackerRun
from manyhands.planner.search import plan
from manyhands.training.types import Evaluation, TrainState
from manyhands.worker import checkpoints as worker_checkpoints
from manyhands.worker import training
from tests.keys.lab import Lab, LabRank, make_rows
from tests.metrics.test_trackers import Recorded
from tests.planner.examples import GIB, data_facts, facts, llama_8b, run_config


def name(lab: Lab) -> None:
    assert lab.prepare({"name": "other"}).folder.path.name == "other"


def output_dir(lab: Lab) -> None:
    runs = lab.new_path("elsewhere")
    assert lab.prepare({"output.dir": str(runs)}).folder.path == runs / "r"
    assert (runs / "r" / "run.json").exists()


def evaluate_tokens(lab: Lab) -> None:
    whole, part = (lab.run(keys).rows("evaluation")[0] for keys in ({}, {"evaluate.max_tokens": 200}))
    assert part["num_tokens"] <= 200 < whole["num_tokens"] and part["num_samples"] < whole["num_samples"]


def evaluate_data(lab: Lab) -> None:
    """Each set has a curve of its own; the validation loss stays that of the held-out samples, or is that of all sets
    together where nothing else is held out."""
    paths = {name: lab.write_rows(f"{name}.jsonl", make_rows(n, seed=n)) for name, n in (("easy", 9), ("hard", 5))}
    with_sets = lab.run({"evaluate.data": paths})
    assert with_sets.column("loss", "evaluation") == lab.base.column("loss", "evaluation")
    assert with_sets.losses == lab.base.losses
    found = with_sets.rows("evaluation")[0]["sets"]
    assert list(found) == ["easy", "hard"]
    whole = {"data.validation_fraction": 0.0}
    alone = {name: lab.run({"data.validation": path, **whole}).rows("evaluation")[0] for name, path in paths.items()}
    for name in paths:
        assert found[name] == {key: alone[name][key] for key in ("loss", "perplexity", "accuracy", "num_loss_tokens")}
    only = lab.run({"evaluate.data": paths, **whole}).rows("evaluation")[0]
    weights = {name: figures["num_loss_tokens"] for name, figures in only["sets"].items()}
    mean = sum(only["sets"][name]["loss"] * weight for name, weight in weights.items()) / sum(weights.values())
    assert only["loss"] == pytest.approx(mean, rel=1e-9) and only["num_samples"] == 14
    assert only["sets"] == found


def prompts(lab: Lab) -> None:
    keys = {"evaluate.prompts": 3, "evaluate.max_new_tokens": 1, "stop.max_steps": 1}
    assert [len(found) for found in lab.run(keys).column("samples", "evaluation")] == [3, 3]
    assert [len(found) for found in lab.base.column("samples", "evaluation")] == [0, 0]


def max_new_tokens(lab: Lab) -> None:
    """One forward pass for each new token, where nothing ends an answer before."""
    counts = []
    for number in (1, 6):
        rank, calls = lab.start({"evaluate.prompts": 1, "evaluate.max_new_tokens": number}), []
        rows = rank.store.validation.take_tokens(None)
        prompts = sample_prompts.SamplePrompts(rank.config, rank.plan, rank.store, rank.tokenizer, rows)
        rank.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sample_prompts, "end_token_ids", lambda *_: frozenset())
            prompts.answer(rank.model, rank.engine, rank.world, lambda *_: None)
        counts.append(len(calls))
    assert counts == [1, 6]


def hours_between_faults(lab: Lab) -> None:
    """Where the seconds of a step are known, as they are not in the lab."""
    given = facts(
        llama_8b(), gpus=4, host_bytes=500 * GIB, data=data_facts(num_samples=50_000, mean=3000, longest=4096)
    )
    hours = lab.config({"checkpoint.hours_between_faults": 6.0}).checkpoint.hours_between_faults
    keys = {"method__name": "full", "checkpoint__hours_between_faults": hours}
    rare, often = (plan(run_config(**asked), given) for asked in ({"method__name": "full"}, keys))
    assert often.checkpoint_every == pytest.approx(rare.checkpoint_every / 2, rel=0.02)


def asynchronous(lab: Lab) -> None:
    """The same files, written by the rank or by another process. Both runs are new: what writes is seen then."""
    keys, files = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 9}, []
    for asked in (True, False):
        rank = lab.start({**keys, "checkpoint.asynchronous": asked})
        with mock.patch.object(Staging, "write", autospec=True, side_effect=Staging.write) as write:
            ran = lab.train(rank)
        assert write.call_count == (3 if asked else 0)
        folders = sorted(ran.rank.folder.checkpoints.iterdir())
        files.append({path.parent.name: path.read_bytes() for each in folders for path in each.glob("*.safetensors")})
    assert list(files[0]) == ["step-000002", "step-000004", "step-000005"] and files[0] == files[1]


def copy_to(lab: Lab) -> None:
    """A machine without the run's folder resumes from the newest copy, bit for bit; a store that fails ends nothing."""
    copies = lab.new_path("copies")
    keys = {"checkpoint.every_steps": 2, "checkpoint.copy_to": copies.as_uri(), "checkpoint.keep_last": 2}
    first = lab.run(keys)
    there = copies / "r" / "checkpoints"
    assert sorted(path.name for path in there.glob("*")) == ["step-000004", "step-000005"]
    (there / "step-000005" / "manifest.json").unlink()  # as if it had not been complete
    rank = lab.start(keys)
    rank.resume()
    assert rank.state.step == 4 and rank.plan.cause == "resume" and rank.folder.path != first.folder
    again = lab.train(rank)
    assert again.losses == first.losses, "rows of the steps before are there too"
    final = [dict(ran.rank.model.named_parameters()) for ran in (first, again)]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])

    rank = lab.start({"checkpoint.copy_to": "memory://nowhere"})
    with (
        mock.patch.object(RemoteFolder, "put", side_effect=RemoteError("the bucket is on holiday")),
        mock.patch.object(worker_checkpoints, "prune", side_effect=PermissionError("not yours")),
    ):
        ran = lab.train(rank)
    assert ran.checkpoints() == [5]
    warning = "warning: step-000005 is not copied (checkpoint.copy_to): the bucket is on holiday"
    assert said(ran.rank).count(warning) == 1
    assert "warning: older checkpoints are not removed (checkpoint.keep_last): not yours" in said(ran.rank)


def said(rank: LabRank) -> str:
    return rank.terminal.getvalue()  # type: ignore[attr-defined]


def keep_best(lab: Lab) -> None:
    """Kept and exported is the second step, the best trained one, though the base model was better."""
    found = {0: 0.5, 1: 1.4, 2: 0.9, 3: 1.2, 4: 1.2, 5: 1.2}
    measure = training.evaluate

    def scripted(parallel: Any, module: Any, batches: Any, state: TrainState, **keys: Any) -> Evaluation:
        return replace(measure(parallel, module, batches, state, **keys), loss=found[state.step])

    best = {
        "checkpoint.keep_best": True,
        "checkpoint.keep_last": 1,
        "evaluate.every_steps": 1,
        "schedule.name": "constant",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "evaluate", scripted)
        ran = lab.export(best)
    assert ran.checkpoints() == [2, 5]
    short = lab.export({"schedule.name": "constant", "stop.max_steps": 2})
    assert all(torch.equal(ran.adapter()[key], tensor) for key, tensor in short.adapter().items())


def tensorboard(lab: Lab) -> None:
    written, left_out = (
        lab.run({"log.tensorboard": wish, "stop.max_steps": 1}).folder / "tensorboard" for wish in (True, False)
    )
    assert list(written.glob("events.out.tfevents.*")) and not left_out.exists()


def tracker(lab: Lab, name: str) -> None:
    """The project, the settings and every step reach the tracker; tests/metrics/test_trackers.py has the libraries."""
    runs: list[TrackerRun] = []
    recorded = Recorded()
    opened = {name: lambda given: runs.append(given) or recorded}
    with mock.patch.dict(trackers.OPENERS, opened), mock.patch.object(prepare, "_refuse_missing_trackers"):
        lab.run({f"log.{name}": "drafts", "stop.max_steps": 2})
    assert len(runs) == 1
    given = runs[0]
    assert given.project == "drafts" and given.settings["stop.max_steps"] == 2
    assert {step for step, values in recorded.rows if "loss/all" in values} == {1, 2} and recorded.outcome == "finished"


wandb, mlflow, trackio = (functools.partial(tracker, name=name) for name in ("wandb", "mlflow", "trackio"))


def output_dtype(lab: Lab) -> None:
    """Of a model, an adapter, and a model that the adapter is merged into."""
    full = {"method.name": "full", "stop.max_steps": 1}
    merged = {"output.merge": True, "stop.max_steps": 1}
    for keys, file in ((full, "model/model"), (merged, "adapter/adapter_model"), (merged, "merged/model")):
        kinds = [
            dtypes(lab.export(keys | wish).folder / f"{file}.safetensors")
            for wish in ({}, {"output.dtype": "bfloat16"}, {"output.dtype": "float16"})
        ]
        assert kinds == [{"F32"}, {"BF16"}, {"F16"}], file


def merge(lab: Lab) -> None:
    from transformers import AutoModelForCausalLM

    ran = lab.export({"output.merge": True})
    assert (ran.folder / "merged").exists() and not (lab.base.folder / "merged").exists()
    merged, base = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (ran.folder / "merged", lab.folder / "model")
    )
    ids = torch.arange(9)[None]
    with torch.no_grad():
        adapted = ran.rank.model.eval()(ids, use_cache=False).logits
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(base(ids).logits, adapted, atol=1e-2)


def dtypes(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
