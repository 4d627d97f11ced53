"""``manyhands export`` on a run's folder: what it writes equals what was trained, and answers."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import manyhands.export.__main__ as command
import manyhands.export.verify_process as fresh_module
from manyhands.checkpoint import save_checkpoint
from manyhands.config.schema import RunConfig
from manyhands.convert.experts import stack_experts
from manyhands.core.errors import UserError
from manyhands.export.__main__ import find_checkpoint, load_trained, main, plan_one_process
from manyhands.export.record import read_record
from manyhands.export.reference import Reference
from manyhands.export.verify import verify
from manyhands.facts.identity import identify_files
from manyhands.infer.__main__ import main as infer_main
from manyhands.infer.load import find_parts, open_answerer
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.resume import describe_run
from manyhands.planner.converters import CONVERTERS, Case, choose_converters
from manyhands.planner.layout import change
from manyhands.planner.types import Plan
from tests.export.tiny import adapt, make_model, save_source
from tests.support import plans
from tests.support.experts import expert_model

IDS = torch.arange(5, 25)[None]
NOTHING: Mapping[str, Any] = {}


@pytest.fixture(autouse=True)
def verify_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fresh process costs ten seconds and has a test of its own."""

    def run(folder: Path, reference_path: Path, *, base: Path | None = None, probe_path: Path | None = None) -> str:
        found = verify(folder, Reference.read(reference_path), base=base, probe_path=probe_path)
        assert found.findings == []
        return f"verified {folder}: " + "; ".join(found.notes)

    monkeypatch.setattr(fresh_module, "verify_in_fresh_process", run)


def make_run(
    root: Path, method: str, *, keep_best: bool = False, dtype: str = "auto", model: Mapping[str, Any] = NOTHING
) -> tuple[Path, dict[int, torch.nn.Module]]:
    """A run's folder with checkpoints at steps 5 and 7, the best at 5; and the models in memory."""
    source = save_source(root / "base", make_model())
    fields = {
        "name": "tiny",
        "model": {"name": str(source), **model},
        "method": {"name": method, "rank": 4, "alpha": 8.0},
        "data": {"train": "x.jsonl"},
    }
    config = RunConfig.model_validate(fields | {"checkpoint": {"keep_best": keep_best}, "output": {"dtype": dtype}})
    run = RunFolder(root / "tiny")
    run.create()
    run.write_config(config)
    plan = make_plan(config, source)
    run.write_plan(plan)
    models = {}
    for step in (5, 7):
        model = make_model(seed=step) if method == "full" else adapt(make_model())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1 + step / 10)
        state = {"step": step, "best_step": 5}
        folder, extra = run.checkpoints / f"step-{step:06d}", describe_run(config, plan)
        save_checkpoint(folder, model, None, state, rank=0, world_size=1, manifest_extra=extra)
        models[step] = model.eval()
    return run.path, models


def make_plan(config: RunConfig, source: Path) -> Plan:
    return plans.make_plan(
        config_digest=config.digest,
        model_folder=str(source),
        device="cuda",
        world_size=8,
        strategy="fsdp",
        activation_checkpointing="full",
        compile=True,
        attention="varlen",
        converters=choose_converters(Case(config, "cuda", "varlen")),
        batch_samples=8,
        num_steps=7,
        output_dtype="float32" if config.output.dtype == "auto" else config.output.dtype,
    )


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def test_whatever_trained_it_one_process_on_the_cpu_opens_it(tmp_path: Path) -> None:
    """The layout is another one, and no field is set that a plan does not have."""
    config = RunConfig.model_validate({"name": "tiny", "model": {"name": "base"}, "data": {"train": "x.jsonl"}})
    trained = make_plan(config, tmp_path)
    trained = trained.model_copy(update={"layout": change(trained.layout, offload="all")})
    opened = plan_one_process(trained, config)
    assert Plan.model_validate(opened.model_dump(mode="json")) == opened
    layout = opened.layout
    assert (layout.device, layout.world_size, layout.strategy, layout.wrapper) == ("cpu", 1, "single", "none")
    assert (layout.compile, layout.activation_checkpointing, layout.offload) == (False, "none", "none")
    assert opened.attention == "sdpa" and not any(CONVERTERS[name].only_while_training for name in opened.converters)


def test_the_best_checkpoint_where_the_run_keeps_it_and_any_other_by_its_folder(tmp_path: Path) -> None:
    run, models = make_run(tmp_path, "full", keep_best=True)
    assert main([str(run), "--output", str(tmp_path / "best")]) == 0
    assert main([str(run / "checkpoints" / "step-000007"), "--output", str(tmp_path / "last")]) == 0
    for name, step in (("best", 5), ("last", 7)):
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / name)), logits(models[step]))


def test_a_checkpoint_of_another_run_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_run(tmp_path, "full")
    manifest = run / "checkpoints" / "step-000007" / "manifest.json"
    config, plan = RunFolder(run).read_config(), RunFolder(run).read_plan()
    fields = json.loads(manifest.read_text())
    for seed, code in ((5, 2), (config.seed, 0)):
        other = config.model_copy(update={"seed": seed})
        manifest.write_text(json.dumps(fields | {"extra": describe_run(other, plan)}))
        assert main([str(run), "--output", str(tmp_path / f"out-{seed}")]) == code
    assert "the checkpoint is of another run" in capsys.readouterr().err


def test_an_adapter_of_a_mixture_is_written_by_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, why in (("full", "--by-expert is for adapters"), ("lora", "hold no experts as separate tensors")):
        run, _ = make_run(tmp_path / method, method)
        assert main([str(run), "--output", str(tmp_path / "none"), "--by-expert"]) == 2
        printed = capsys.readouterr()
        assert why in printed.err and not printed.out and not (tmp_path / "none").exists()
    adapt_stacks, choose = adapt, choose_converters
    base = expert_model("qwen3_moe", eager=False, vocab_size=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    monkeypatch.setattr(f"{__name__}.make_model", lambda: copy.deepcopy(base))
    monkeypatch.setattr(f"{__name__}.adapt", lambda model: (stack_experts(model), adapt_stacks(model))[1])
    monkeypatch.setattr(f"{__name__}.choose_converters", lambda case: choose(replace(case, has_groups=True)))
    run, models = make_run(tmp_path / "mixture", "lora")
    assert main([str(run), "--output", str(tmp_path / "out"), "--by-expert"]) == 0
    said = capsys.readouterr().out
    assert "updates of 32 matrices of experts read back" in said and ".adapter-" not in said
    assert main([str(run), "--output", str(tmp_path / "stacks")]) == 0
    assert "export it with --by-expert or --merge" in capsys.readouterr().out
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("out", "stacks")}
    assert ("vllm serve" in cards["out"], "Do not serve" in cards["out"]) == (True, False)
    assert ("vllm serve" in cards["stacks"], "Do not serve" in cards["stacks"]) == (False, True)
    record = read_record(tmp_path / "out")
    assert record is not None and "updates of 32 matrices" in record.verified
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "mixture" / "base", dtype=torch.float32)
    opened = PeftModel.from_pretrained(source, str(tmp_path / "out"))
    torch.testing.assert_close(logits(opened), logits(models[7]), rtol=0, atol=1e-4)


def test_an_adapter_is_opened_beside_the_base_that_it_was_trained_on(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "lora")
    files = identify_files(tmp_path / "base", RunFolder(run).read_config())
    plan = RunFolder(run).read_plan().model_copy(update={"model_files": files, "number": 2})
    RunFolder(run).write_plan(plan)
    assert main([str(run), "--output", str(tmp_path / "out")]) == 0
    assert find_parts(tmp_path / "out").weights == tmp_path / "base"
    save_source(tmp_path / "base", make_model(seed=9))
    with pytest.raises(UserError, match="not the one that the adapter was trained on") as caught:
        find_parts(tmp_path / "out")
    assert [line.partition(":")[0] for line in caught.value.details] == ["model.safetensors"]
    assert find_parts(tmp_path / "out", str(tmp_path / "base")).adapter == tmp_path / "out"


def test_another_checkpoint_does_not_take_the_place_of_the_best(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "full", keep_best=True)
    best, newest = (run / "checkpoints" / f"step-{step:06d}" for step in (5, 7))
    best.rename(best.with_name(f"{best.name}.damaged"))
    with pytest.raises(UserError, match="the best checkpoint, of step 5, is not there") as caught:
        find_checkpoint(run)
    assert caught.value.fix.endswith(f"manyhands export {newest}")
    assert find_checkpoint(newest) == (run.resolve(), newest.resolve())
    state = newest / "train_state.json"
    state.write_text(
        state.read_text().replace('"best_step": 5', '"best_step": 0')
    )  # none was evaluated since the start
    assert find_checkpoint(run) == (run, newest)


@pytest.mark.parametrize("merge", [(), ("--merge",)])
def test_a_second_export_is_there_already_unless_it_would_be_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], merge: tuple[str, ...]
) -> None:
    run, _ = make_run(tmp_path, "lora")
    command_line = [str(run), "--output", str(tmp_path / "out"), *merge]
    for said in ("verified ", "already there, verified: "):
        assert main(command_line) == 0
        assert capsys.readouterr().out.startswith(f"exporting {run}/checkpoints/step-000007\n{said}")
    others = ["--dtype", "bfloat16"], [] if merge else ["--merge"]
    for other in (*filter(None, others),):
        assert main([*command_line, *other]) == 2 and "not empty" in capsys.readouterr().err
    assert main([str(run / "checkpoints" / "step-000005"), *command_line[1:]]) == 2
    next((tmp_path / "out").glob("*.safetensors")).write_bytes(b"changed")
    assert main(command_line) == 2 and "not empty" in capsys.readouterr().err


def test_an_adapter_ends_its_answers_where_the_merged_model_does(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "lora", model={"special_tokens": {"eos": "w9"}})
    assert main([str(run), "--output", str(tmp_path / "adapter")]) == 0
    assert main([str(run), "--output", str(tmp_path / "merged"), "--merge"]) == 0
    adapter, merged = (open_answerer(tmp_path / name) for name in ("adapter", "merged"))
    assert adapter.tokenizer.eos_token_id in adapter.end_ids == merged.end_ids


@pytest.mark.parametrize(
    ("asked", "dtype", "deviation"),
    [((), "bfloat16", 0.1), (("--dtype", "float16"), "float16", 2e-2), (("--dtype", "float32"), "float32", 1e-5)],
    ids=["the run's own", "float16", "float32"],
)
def test_dtype_takes_the_place_of_the_runs_own(
    tmp_path: Path, asked: tuple[str, ...], dtype: str, deviation: float
) -> None:
    run, models = make_run(tmp_path, "lora", dtype="bfloat16")
    assert main([str(run), "--output", str(tmp_path / "merged"), "--merge", *asked]) == 0
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(opened), logits(models[7]), rtol=0, atol=deviation)
    record = read_record(tmp_path / "merged")
    assert record is not None and "logits of 16 tokens deviate" in record.verified
    assert f"Saved in {dtype}" in (tmp_path / "merged" / "README.md").read_text()


def test_a_run_folder_answers_once_it_has_written_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_run(tmp_path, "lora")
    question = {"folder": str(run), "prompt": "w1 w2", "settings": {"max_new_tokens": 5}}
    assert infer_main(["generate", json.dumps(question)]) == 2
    assert "the run has written no model yet" in capsys.readouterr().err
    assert main([str(run), "--output", str(run / "adapter")]) == 0
    capsys.readouterr()
    assert infer_main(["generate", json.dumps(question)]) == 0
    assert capsys.readouterr().out.strip()


def test_a_checkpoint_that_its_run_removes_meanwhile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run(tmp_path, "lora")

    def remove_first(plan: Plan, config: RunConfig, checkpoint: Path) -> torch.nn.Module:
        shutil.rmtree(checkpoint)
        return load_trained(plan, config, checkpoint)

    monkeypatch.setattr(command, "load_trained", remove_first)
    assert main([str(run), "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "was removed while it was read" in said and "step-000007" in said and not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_run(tmp_path, "full")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("ten years")
    cases = {
        "neither a run nor a checkpoint": [str(tmp_path), "--output", str(tmp_path / "out")],
        "--merge is for runs with method.name=lora": [str(run), "--output", str(tmp_path / "out"), "--merge"],
        "the output folder is not empty": [str(run), "--output", str(tmp_path / "full")],
    }
    for text, arguments in cases.items():
        assert main(arguments) == 2
        assert text in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main([str(run), "--output", str(tmp_path / "out")]) == 2
    assert "the run has no checkpoint" in capsys.readouterr().err
    assert json.loads((run / "run.json").read_text())["name"] == "tiny"
