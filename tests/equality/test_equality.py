"""The same run in many layouts gives the same numbers; two planted mistakes do not pass the same comparison.

Tiny models of two blocks, 20 steps, rows of 5 to 200 tokens of which one to almost all are trained, a short last step
in which ranks idle, clipping in some steps and not in others. The whole table is made by `make equality`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import equality, equality_page
from tests.support.equality import Case, Curve
from tests.support.ranks import Ranks, ranks
from tests.support.ropes import rope_fields

FAST = (
    "single 1, accumulation 8",
    "single 1, packed 256",
    "ddp 2, accumulation 2",
    "ddp 4, packed 256",
    "fsdp 2, packed 256",
    "fsdp 4, accumulation 1",
    "fsdp 4, packed 512, activation_checkpointing full",
)
CASES = equality.cases()
REFERENCE = CASES[0]
# In CI every layout trains all weights in float64, and each other method runs on one process, by DDP and by FSDP2;
# float32, whose bound is the wider one, runs once a strategy. The other pairs are nightly.
IN_CI = {
    *(("float64", "full", name) for name in FAST),
    ("float64", "lora", "single 1, packed 256"),
    ("float64", "lora", "ddp 2, accumulation 2"),
    ("float64", "lora", "fsdp 4, packed 512, activation_checkpointing full"),
    ("float64", "patterns", "single 1, accumulation 8"),
    ("float64", "patterns", "ddp 4, packed 256"),
    ("float64", "patterns", "fsdp 2, packed 256"),
    ("float32", "full", "fsdp 4, accumulation 1"),
    ("float32", "lora", "fsdp 4, packed 512, activation_checkpointing full"),
    ("float32", "patterns", "ddp 4, packed 256"),
}
AGREE = [
    pytest.param(name, dtype, method, marks=[] if (dtype, method, name) in IN_CI else [pytest.mark.slow])
    for dtype in ("float32", "float64")
    for method in ("full", "lora", "patterns")
    for name in FAST
]


class Workspaces:
    """One folder a family, and the reference curve of each (dtype, method), computed once."""

    def __init__(self, root: Path, world: Ranks) -> None:
        self.root, self.world = root, world
        self.references: dict[tuple[str, str], Curve] = {}

    def folder(self, dtype: str) -> Path:
        folder = self.root / equality.FAMILY[dtype]
        if not folder.exists():
            folder.mkdir()
            equality.write_workspace(folder, equality.FAMILY[dtype], num_hidden_layers=2)
        return folder

    def run(self, case: Case, dtype: str, method: str) -> Curve:
        return equality.run_case(self.world, self.folder(dtype), case, dtype, method)

    def reference(self, dtype: str, method: str) -> Curve:
        if (dtype, method) not in self.references:
            self.references[dtype, method] = self.run(REFERENCE, dtype, method)
        return self.references[dtype, method]


@pytest.fixture(scope="module")
def workspaces(tmp_path_factory: pytest.TempPathFactory, world: Ranks) -> Workspaces:
    return Workspaces(tmp_path_factory.mktemp("equality"), world)


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "dtype", "method"), AGREE)
def test_layouts_agree(workspaces: Workspaces, name: str, dtype: str, method: str) -> None:
    deviation = equality.compare(workspaces.reference(dtype, method), workspaces.run(by_name(name), dtype, method))
    assert deviation.loss <= equality.BOUNDS[dtype] and deviation.norm <= equality.NORM_BOUNDS[dtype], deviation


@pytest.mark.ci
@pytest.mark.distributed
def test_steps_of_packs_agree_over_ranks_micro_batches_and_without_packing(workspaces: Workspaces) -> None:
    size = {"batch.samples": "auto", "batch.packs": 3}
    unpacked = {"data.packing": False, "batch.micro_samples": 4}
    first, *others = (
        workspaces.run(Case(f"packs {world} {how}", world, size | how), "float64", "lora")
        for world, how in (
            (1, unpacked),
            (1, {"batch.micro_tokens": 768}),
            (2, {"batch.micro_tokens": 256}),
            (2, unpacked),
        )
    )
    for other in others:
        assert equality.compare(first, other).within("float64")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", [case for case in CASES[1:] if case.name not in FAST], ids=lambda case: case.name)
def test_every_other_layout_agrees(workspaces: Workspaces, case: Case) -> None:
    deviation = equality.compare(workspaces.reference("float32", "full"), workspaces.run(case, "float32", "full"))
    assert deviation.within("float32"), deviation


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("family", equality.WITH_IMAGES)
def test_layouts_agree_on_rows_with_images(family: str, tmp_path: Path, world: Ranks) -> None:
    equality.write_workspace_with_images(tmp_path, family)
    cases = [REFERENCE, *map(by_name, ("single 1, packed 256", "fsdp 2, packed 256"))]
    reference, *others = (
        equality.run_case(world, tmp_path, equality.with_parts(case, "lora"), "float32", "lora") for case in cases
    )
    for other in others:
        assert equality.compare(reference, other).within("float32")


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspaces]:
    with ranks(2, "cuda") as world:
        yield Workspaces(tmp_path_factory.mktemp("equality-gpus"), world)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ddp 2, packed 256", "full"),
        ("fsdp 2, packed 256", "full"),
        ("fsdp 2, packed 512, activation_checkpointing full", "full"),
        ("ddp 2, accumulation 2", "lora"),
        ("fsdp 2, packed 256", "lora"),
    ],
)
def test_two_gpus_give_the_numbers_of_one(on_gpus: Workspaces, name: str, method: str) -> None:
    """Over NCCL, in bfloat16, with the kernels of a GPU."""
    deviation = equality.compare(on_gpus.reference("bfloat16", method), on_gpus.run(by_name(name), "bfloat16", method))
    assert deviation.within("bfloat16"), deviation


@pytest.mark.parametrize("fault", equality.faulty_cases(), ids=lambda case: case.fault)
def test_a_planted_mistake_does_not_pass(workspaces: Workspaces, fault: Case) -> None:
    deviation = equality.compare(workspaces.reference("float32", "full"), workspaces.run(fault, "float32", "full"))
    assert not deviation.within("float32")
    assert deviation.loss > 100 * equality.BOUNDS["float32"]


def test_the_run_is_worth_comparing(workspaces: Workspaces) -> None:
    """The loss falls by a tenth, clipping acts in some steps and not in others, and a rank idles in some."""
    curve = workspaces.reference("float32", "full")
    assert len(curve.losses) == equality.NUM_STEPS
    assert curve.losses[-1] <= 0.9 * curve.losses[0]
    clipped = sum(norm > equality.CLIP for norm in curve.norms)
    assert 0 < clipped < equality.NUM_STEPS
    four = workspaces.run(by_name("ddp 4, accumulation 1"), "float32", "full")
    assert four.num_steps_with_idle_rank > 0


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_layouts_agree_where_rotary_frequencies_hang_on_the_length(kind: str, tmp_path: Path, world: Ranks) -> None:
    """Rows are of 5 to 200 tokens, on both sides of the bound."""
    equality.write_workspace(tmp_path, "llama", num_hidden_layers=2, **rope_fields("llama", kind, 256))
    names = ("single 1, packed 256", "ddp 2, accumulation 2", "fsdp 4, packed 512, activation_checkpointing full")
    reference, *others = (
        equality.run_case(world, tmp_path, case, "float32", "full") for case in (REFERENCE, *map(by_name, names))
    )
    for other in others:
        assert equality.compare(reference, other).within("float32")


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "kind", "method"), [("lfm2", "conv", "full"), ("qwen3_5_text", "linear_attention", "lora")]
)
def test_layouts_agree_where_states_run_along_rows(
    family: str, kind: str, method: str, tmp_path: Path, world: Ranks
) -> None:
    equality.write_workspace(tmp_path, family, num_hidden_layers=2, layer_types=[kind, "full_attention"])
    names = ("single 1, packed 256", "ddp 2, accumulation 2", "fsdp 2, packed 512, activation_checkpointing full")
    reference, *others = (
        equality.run_case(world, tmp_path, case, "float32", method) for case in (REFERENCE, *map(by_name, names))
    )
    deviations = [equality.compare(reference, other) for other in others]
    assert all(deviation.within("float32") for deviation in deviations), deviations


def test_the_page_is_what_its_rows_make_of_it() -> None:
    page = equality_page.PAGE.read_text(encoding="utf-8")
    layouts, families = equality_page.read(equality_page.LAYOUTS), equality_page.read(equality_page.FAMILIES)
    assert page == equality_page.write_page(page, layouts, families)
    for row in layouts:
        within = row["loss"] <= equality.BOUNDS[row["dtype"]] and row["norm"] <= equality.NORM_BOUNDS[row["dtype"]]
        assert within != row["planted"], row
