"""``manyhands.load``, and which process of how many this one is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.export.record import write_record
from tests.support.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> mh.LanguageModel:
    return mh.load(write_tiny_model(tmp_path_factory.mktemp("model")))


def test_answers_come_in_order_and_are_those_of_each_prompt_alone(model: mh.LanguageModel) -> None:
    conversation = [{"role": "user", "content": "alpha beta gamma delta"}]
    answers = model.generate(["alpha", "beta beta", conversation], max_new_tokens=5)
    alone = [model.generate(prompt, max_new_tokens=5) for prompt in ("alpha", "beta beta")]
    assert answers == [*alone, *model.generate([conversation], max_new_tokens=5)]


def test_options_of_generation(model: mh.LanguageModel) -> None:
    drawn = [model.generate("alpha", max_new_tokens=5, temperature=5.0, seed=seed) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    whole = model.generate("alpha", max_new_tokens=5)
    assert model.generate("alpha", max_new_tokens=5, stop=f"{whole[-1]}?") == whole, "one text, not its characters"
    pieces: list[str] = []
    answer = model.generate("alpha", max_new_tokens=5, on_text=lambda number, text: pieces.append(text))
    assert "".join(pieces) == answer
    ids = model.tokenizer("alpha", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 2


@pytest.mark.ci
@pytest.mark.parametrize(
    ("call", "what", "fix"),
    [
        (lambda model: model.generate("a", temprature=1), "no option 'temprature'", "did you mean temperature?"),
        (lambda model: model.generate(5), "prompts are a int", 'give a list, such as ["Why is the sky blue?"]'),
        (lambda model: model.save_pretrained("x"), "has not been trained", "save it after Trainer(...).train()"),
        (lambda model: model.save_pretrained("x", push_to_hub=True), "push_to_hub has no effect", "leave it out"),
        (
            lambda model: mh.FastLanguageModel.for_training(model, use_gradient_checkpointing=False),
            "has no effect here",
            "get_peft_model",
        ),
        (lambda model: model.generate([{"role": "user", "content": "a"}]), "prompt 0 is a dict", "a list in a list"),
        (lambda model: model.generate([5]), "prompt 0 is a int", "give texts or conversations"),
        (lambda model: model.generate([[{"role": "robot", "content": "a"}]]), "has the role 'robot'", ""),
        (lambda model: model.generate(["\ud800"]), "half of a surrogate pair", ""),
        (lambda model: model.generate("a", temperature="hot"), "a value of the wrong type", ""),
        (lambda model: model.generate("a", max_new_tokens=2.5), "a value of the wrong type", ""),
        (lambda model: model.generate_file("a", "b", processes=0), "0 processes answer nothing", ""),
        (lambda model: mh.plan("run.yaml", ["batch.samples=3"]), "overrides are a list", "batch.samples"),
        (lambda model: mh.plan("run.yaml", {"seed": {1}}), "a value that is a set", "numbers"),
        (lambda model: mh.TrainedRun("/nonexistent").report, "the run has no report", "let it finish"),
        (lambda model: mh.load("/nonexistent"), "no such folder", ""),
        (lambda model: mh.load(model.folder, device_map="left"), "device_map is 'left'", ""),
    ],
)
def test_mistakes(model: mh.LanguageModel, call, what: str, fix: str) -> None:
    with pytest.raises(mh.UserError, match=what) as error:
        call(model)
    assert fix in error.value.fix


def test_a_device_map_places_the_layers(model: mh.LanguageModel) -> None:
    pytest.importorskip("accelerate")
    placed = mh.load(model.folder, device_map={"": "cpu"})
    assert placed.generate("alpha", max_new_tokens=3) == model.generate("alpha", max_new_tokens=3)
    with pytest.raises(mh.UserError, match="a device_map by modules is of one copy"):
        placed.generate_file("in.jsonl", "out.jsonl")


PROBE = """
import sys
import manyhands as mh
before = mh.distributed_info()
assert "torch" not in sys.modules
import torch.distributed as dist
assert mh.is_distributed_available() and not before["initialized"] and before["backend"] is None
dist.init_process_group("gloo")
after = mh.distributed_info()
assert (after["initialized"], after["backend"]) == (True, "gloo")
assert {**after, "initialized": False, "backend": None} == before, (before, after)
sys.stdout.write(f"{mh.get_rank()} {mh.get_world_size()} {mh.get_local_rank()} {before['launcher']}\\n")
"""


@pytest.mark.slow
def test_ranks_are_the_same_before_and_after_initialization() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--no-python", sys.executable, "-c"]
    done = subprocess.run([*command, PROBE], capture_output=True, text=True, timeout=240)
    assert sorted(done.stdout.splitlines()) == ["0 2 0 torchrun", "1 2 1 torchrun"], done.stderr


def test_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    info = mh.distributed_info()
    assert (info["launcher"], info["rank"], info["world_size"], info["master"]) == ("none", 0, 1, None)
    mh.print_distributed_info()
    assert "rank 0 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(("local", "rank"), [("1", "3")])
def test_ranks_by_the_launchers_variables(monkeypatch: pytest.MonkeyPatch, local: str, rank: str) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (mh.get_rank(), mh.get_world_size(), mh.get_local_rank()) == (3, 4, 1)


def test_released_weights_are_read_again(model: mh.LanguageModel) -> None:
    before, held = model.generate("alpha", max_new_tokens=3), model.answerer
    model.release()
    assert model.generate("alpha", max_new_tokens=3) == before and model.answerer is not held


def test_rows_of_answers_are_lines_of_their_file_whatever_they_hold(
    model: mh.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "a\u2028b\x85c", "answer": "d\u2029e"}, {"prompt": "f", "answer": ""}]
    output = tmp_path / "out.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    monkeypatch.setattr("manyhands.api.model._run_infer", lambda asked: output.write_text(text, encoding="utf-8"))
    assert model.generate_file(tmp_path / "in.jsonl", output) == rows


def test_what_is_saved_again_keeps_a_card_of_the_users_and_no_adapter_beside_a_model(tmp_path: Path) -> None:
    for kind, name in (("adapter", "adapter_config.json"), ("model", "config.json")):
        folder = tmp_path / kind / kind
        folder.mkdir(parents=True)
        (folder / "README.md").write_text(f"of the {kind}")
        (folder / name).write_text("{}")
        write_record(folder)
    adapter, whole = (mh.LanguageModel(tmp_path / kind) for kind in ("adapter", "model"))
    with pytest.raises(mh.UserError, match="has not been trained"):
        adapter.save_pretrained(tmp_path / "saved")
    for model in (adapter, whole):
        model.outputs = mh.TrainedRun(model.folder).outputs
    for _ in range(2):
        adapter.save_pretrained(tmp_path / "saved")
    card = tmp_path / "saved" / "README.md"
    assert card.read_text() == "of the adapter"
    card.write_text("mine")
    adapter.save_pretrained(tmp_path / "saved")
    assert card.read_text() == "mine"
    adapter.save_pretrained(tmp_path / "adapter" / "adapter")  # there it is already
    for target, what in ((tmp_path / "saved", "holds an adapter, and this is a model"), (card, "is a file")):
        with pytest.raises(mh.UserError, match=what):
            whole.save_pretrained(target)
    (tmp_path / "model" / "model" / "model.safetensors").touch()
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(mh.UserError, match="holds a model, and this is an adapter"):
        adapter.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole" / "README.md").read_text() == "of the model"
    whole.outputs = mh.TrainedRun(tmp_path).outputs
    (tmp_path / "adapter").rename(tmp_path / "elsewhere")
    (tmp_path / "model").rename(tmp_path / "gone")
    with pytest.raises(mh.UserError, match="has written no model"):
        whole.save_pretrained(tmp_path / "other")


def test_what_a_process_dies_of_is_its_message(
    model: mh.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "python"
    child.write_text("#!/bin/sh\necho 'Traceback:\n  File x.py, line 3' >&2\necho 'OSError: no space' >&2\nexit 1\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(mh.UserError) as error:
        model.generate_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert error.value.what == "OSError: no space"


def test_an_interrupt_leaves_no_process_behind(
    model: mh.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho working >&2\nexec sleep 60\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))

    class Interrupted:
        def write(self, text: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        model.generate_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()


def test_a_run_that_diverged_and_was_killed_can_be_looked_at(tmp_path: Path) -> None:
    rows = '{"kind": "step", "step": 1, "loss": 2.0}\n{"kind": "step", "step": 2, "loss": null}\n{"kind": "st'
    (tmp_path / "metrics.jsonl").write_text(rows)
    run = mh.TrainedRun(tmp_path)
    assert run.losses == [2.0, None] and "loss 2.0000 to 2.0000" in repr(run)
