"""The matrix: {full, lora, qlora, patterns} x {one, DDP, FSDP2, hybrid}, one test a cell.

A cell trains rows of very different lengths with accumulation, an uneven last step, clipping in some steps and not in
others; evaluates, saves half-way, exports, is reopened, and is lost and started again. It must be the one-process cell
within the bounds of docs/equality.md, and its own resumed self bit for bit. Other optimizers go through the same cells.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manyhands.checkpoint.manifest import read_manifest
from manyhands.core.errors import UserError
from manyhands.export.__main__ import main as export
from manyhands.launch.run.folder import RunFolder
from tests.matrix.cells import CASES, NUM_STEPS, SAVED_STEP, STAND_INS, Ended, Workshop, beyond, deviations, lose
from tests.support.equality import BOUNDS, Case, base_config
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed

IS_TRAINED: dict[str, Callable[[str], bool]] = {
    "full": lambda name: True,
    "lora": lambda name: ".lora_" in name,
    "qlora": lambda name: ".lora_" in name,
    "patterns": lambda name: (
        "norm" in name
        or name == "model.embed_tokens.weight"
        or (name.startswith("model.layers.1.") and "q_proj" not in name and "k_proj" not in name)
    ),
}
CELLS = [(method, strategy) for method in IS_TRAINED for strategy in CASES]
IDS = [f"{method}-{strategy}" for method, strategy in CELLS]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, world: Ranks) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("matrix"), world)


def need(method: str) -> None:
    """Skips where what reopens the method's output is not installed."""
    for package in {"lora": ("peft",), "qlora": ("bitsandbytes", "peft")}.get(method, ()):
        pytest.importorskip(package)


@pytest.mark.ci
@pytest.mark.parametrize(("method", "strategy"), CELLS, ids=IDS)
def test_cell(workshop: Workshop, method: str, strategy: str) -> None:
    need(method)
    check_cell(workshop, method, strategy, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "strategy"), CELLS, ids=IDS)
def test_cell_in_bfloat16(workshop: Workshop, method: str, strategy: str) -> None:
    """What is trained has float32 masters; products are in bfloat16."""
    need(method)
    check_cell(workshop, method, strategy, "bfloat16")


def check_cell(workshop: Workshop, method: str, strategy: str, dtype: str) -> None:
    cell = workshop.cell(method, strategy, dtype)
    check_course(cell)
    check_frozen_cost_nothing(cell, strategy)
    check_saved(workshop, cell, dtype)
    found = workshop.reopen(cell)
    assert found.findings == []
    assert any("reopened by" in note for note in found.notes) and any("logits of" in note for note in found.notes), (
        found.notes
    )
    check_same_bits(cell, workshop.resumed(method, strategy, dtype))
    apart = deviations(workshop.cell(method, "single", dtype), cell, IS_TRAINED[method])
    assert not beyond(apart, dtype), apart


def check_course(cell: Ended) -> None:
    """Every step was taken, evaluated and saved where it should be, and the run learns."""
    run = cell.run
    assert [step for step, _, _ in run.course()] == list(range(1, NUM_STEPS + 1))
    assert [step for step, _ in run.evaluations()] == [0, SAVED_STEP, NUM_STEPS]
    assert run.steps_saved() == [SAVED_STEP, NUM_STEPS]
    assert run.losses()[-1] < 0.9 * run.losses()[0] and run.evaluations()[-1][1] < 0.95 * run.evaluations()[0][1]
    assert max(row["num_micro_batches"] for row in run.rows()) > 1


def check_frozen_cost_nothing(cell: Ended, strategy: str) -> None:
    """What is frozen gets no gradient, no place in the optimizer and no reduction; what is trained gets all three, once
    a step, or reduced as often as the plan says.
    """
    every = RunFolder(cell.folder).read_plan().layout.reduce_every and strategy in ("fsdp", "hsdp")
    rounds = [row["num_micro_batches"] if every else 1 for row in cell.run.rows()]
    for seen in cell.ranks:
        trained = {name for name in seen.num_values if IS_TRAINED[cell.method](name)}
        assert trained and (len(trained) == len(seen.num_values)) == (cell.method == "full")
        assert seen.exit_code == 0
        assert seen.with_gradient == seen.in_optimizer == seen.with_state == trained
        num_trained = sum(seen.num_values[name] for name in trained)
        assert seen.reduced == [0 if strategy == "single" else num_trained * times for times in rounds]


def check_saved(workshop: Workshop, cell: Ended, dtype: str) -> None:
    """Checkpoints hold what is trained and its states alone; frozen weights of a written model are the source's."""
    for step in (SAVED_STEP, NUM_STEPS):
        saved = read_manifest(cell.folder / "checkpoints" / f"step-{step:06d}").tensors
        weights = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
        states = {name.removeprefix("optim.").partition(".")[2] for name in saved if name.startswith("optim.")}
        assert weights == states == cell.ranks[0].in_optimizer and len(saved) > 2 * len(weights)
    if cell.output.name == "model":
        written, source = load_file(cell.weights_file), workshop.source()
        kept = getattr(torch, dtype)  # in which frozen weights are held, and so rounded
        same = {name for name, tensor in source.items() if torch.equal(tensor.to(kept).float(), written[name])}
        assert written.keys() == source.keys() and same == {
            name for name in source if not IS_TRAINED[cell.method](name)
        }


def check_same_bits(cell: Ended, resumed: Ended) -> None:
    assert "resumed after step 4 from step-000004" in (resumed.folder / "logs" / "rank-0.log").read_text()
    assert (resumed.run.course(), resumed.run.evaluations()) == (cell.run.course(), cell.run.evaluations())
    assert resumed.weights_file.read_bytes() == cell.weights_file.read_bytes()
    assert resumed.run.read("plans/002.json")["cause"] == "resume"


@pytest.mark.slow
def test_a_checkpoint_of_some_weights_is_exported_as_a_whole_model(workshop: Workshop, tmp_path: Path) -> None:
    """By the command and verified in a new process: the file that the run itself wrote."""
    cell = workshop.cell("patterns", "fsdp")
    assert export([str(cell.folder), "--output", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == cell.weights_file.read_bytes()


# Each optimizer's bounds are those of the coarsest arithmetic between gradient and weight: moments in 8 bits are as
# coarse as bfloat16.
OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "muon": ("float32", ("full", "lora", "patterns")),
    "adafactor": ("float32", ("full", "lora", "patterns")),
    "adamw_8bit": ("bfloat16", ("full",)),  # factors of adapters this small keep moments in 32 bits
    "paged_adamw": ("float32", ("full",)),
}
OTHERS = [
    (name, method, strategy)
    for name in OPTIMIZERS
    for method in OPTIMIZERS[name][1]
    for strategy in ("ddp", "fsdp", "hsdp")
]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "method", "strategy"), OTHERS, ids=["-".join(other) for other in OTHERS])
def test_other_optimizers(workshop: Workshop, optimizer: str, method: str, strategy: str) -> None:
    """Equal to one process and to the resumed run; kernels of bitsandbytes, which are for GPUs, are stood in for in
    plain torch.
    """
    need(method)
    if STAND_INS.get(optimizer) == "kernels":
        pytest.importorskip("bitsandbytes")
    cell = workshop.cell(method, strategy, optimizer=optimizer)
    check_course(cell)
    check_frozen_cost_nothing(cell, strategy)
    assert workshop.reopen(cell).findings == []
    check_same_bits(cell, workshop.resumed(method, strategy, optimizer=optimizer))
    apart = deviations(workshop.cell(method, "single", optimizer=optimizer), cell, IS_TRAINED[method])
    assert not beyond(apart, OPTIMIZERS[optimizer][0]), apart


@pytest.mark.slow
def test_8bit_moments_over_two_shards_then_one_then_two_again(workshop: Workshop) -> None:
    """Blocks of 256 values lie otherwise in each: the run stays as near to one left alone as layouts are."""
    pytest.importorskip("bitsandbytes")
    keys = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 4}
    alone = workshop.run("left-alone", "full", "hsdp", optimizer="adamw_8bit", **keys)
    folder = workshop.root / "runs" / "passed-on" / alone.folder.name
    shutil.copytree(alone.folder, folder)
    for step, strategy in ((4, "single"), (6, "hsdp")):
        lose(folder, step)
        ended = workshop.run("passed-on", "full", strategy, optimizer="adamw_8bit", **keys)
        log = (folder / "logs" / "rank-0.log").read_text()
        assert f"resumed after step {step} from step-{step:06d}" in log and "were quantized again" in log
        apart = deviations(alone, ended, IS_TRAINED["full"])
        assert apart["weights"] > 0 and not beyond(apart, "bfloat16"), apart


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_a_cpu_is_refused_the_optimizers_of_bitsandbytes(tmp_path: Path, optimizer: str) -> None:
    """By the run file alone, with no model or data at hand."""
    with pytest.raises(UserError, match="optimizer") as caught:
        base_config(tmp_path, "float32", "full", Case("refused", keys={"optimizer.name": optimizer}), "cpu")
    assert "on GPUs only" in str(caught.value) and "use adamw" in str(caught.value)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "fault"), [("ddp", "averaged"), ("fsdp", "averaged"), ("hsdp", "averaged"), ("hsdp", "apart")]
)
def test_gradients_that_are_averaged_or_stay_apart_do_not_pass(workshop: Workshop, strategy: str, fault: str) -> None:
    found = workshop.run(f"{fault}-{strategy}", "full", strategy, fault=fault)  # type: ignore[arg-type]
    apart = deviations(workshop.cell("full", "single"), found, IS_TRAINED["full"])
    assert {"loss", "norm", "evaluation", "weights"} == beyond(apart, "float32").keys()
    assert min(apart.values()) > 100 * BOUNDS["float32"], apart


@pytest.mark.ci
@pytest.mark.parametrize("method", IS_TRAINED)
def test_the_run_is_worth_comparing(workshop: Workshop, method: str) -> None:
    """Clipping acts in some steps and not in others, ranks have unequal work, and in the short step one of four has
    none.
    """
    need(method)
    norms = workshop.cell(method, "single").curve().norms
    assert min(norms) < 4.0 < max(norms)
    rows = workshop.cell(method, "hsdp").run.rows()
    assert [row["num_samples"] for row in rows] == [8] * 6 + [3, 8]
    assert [row["rank_losses"].count(None) for row in rows] == [0] * 6 + [1, 0]
