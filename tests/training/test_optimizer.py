from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer
from transformers.optimization import Adafactor as PublishedAdafactor

from manyhands.config.schema import MethodSection, OptimizerSection
from manyhands.convert.lora import apply_lora
from manyhands.core.errors import UserError
from manyhands.optim.muon import orthogonalize
from manyhands.optim.registry import OPTIMIZERS
from manyhands.training.optimizer import group_parameters, make_optimizer, rates_by_pattern, set_learning_rate
from tests.support.tiny import tiny_model
from tests.training import optimizer_ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def names_of(groups: list[dict[str, Any]]) -> list[list[str]]:
    return [[name for name, _ in group["params"]] for group in groups]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rates", [{}, {"inner.weight": 1e-3, "bias": 1e-2}])
def test_every_trained_parameter_is_in_exactly_one_group(name: str, rates: dict[str, float]) -> None:
    model = Tied()
    model.norm.bias.requires_grad_(False)
    with optimizer_ranks.cpu_kernels():
        optimizer = make_optimizer(model, OptimizerSection(name=name, learning_rates=rates), 0.1, blocks=["inner"])
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_weight_decay_reaches_matrices_only() -> None:
    decayed, kept = group_parameters(Tied(), OptimizerSection(weight_decay=0.1), 0.1)
    assert names_of([decayed]) == [["inner.weight"]] and decayed["weight_decay"] == 0.1
    assert (
        set(names_of([kept])[0]) == {"embed.weight", "norm.weight", "norm.bias", "inner.bias"}
        and kept["weight_decay"] == 0.0
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_embeddings_decay_on_request_as_in_transformers_trainer(family: str) -> None:
    """Tied or not, whatever decays there decays here."""
    model = tiny_model(family)
    groups = group_parameters(model, OptimizerSection(weight_decay=0.1, decay_embeddings=True), 0.1)
    decayed = {name for group in groups if group["weight_decay"] for name, _ in group["params"]}
    assert decayed == set(Trainer.get_decay_parameter_names(None, model)) & dict(model.named_parameters()).keys()
    assert "model.embed_tokens.weight" in decayed
    assert [group["is_matrix"] for group in groups] == [True, False, False], "states of embeddings keep 32 bits"


def test_a_rate_for_lora_b_is_lora_plus() -> None:
    """The same rates for the same parameters as PEFT's own."""
    peft = pytest.importorskip("peft")
    names = ["q_proj", "down_proj"]
    theirs = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, target_modules=names))
    make = pytest.importorskip("peft.optimizers").create_loraplus_optimizer
    optimizer = make(theirs, torch.optim.AdamW, lr=2e-4, loraplus_lr_ratio=16.0)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): rates[id(parameter)]
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    mine = tiny_model("llama")
    apply_lora(mine, MethodSection(name="lora", rank=4, target_modules=tuple(names)), 0)
    groups = group_parameters(mine, OptimizerSection(learning_rates={"lora_B": 16 * 2e-4}), 2e-4)
    assert {name: group["lr"] for group in groups for name, _ in group["params"]} == expected
    assert set(expected.values()) == {2e-4, 16 * 2e-4}


def test_one_step_is_adamw() -> None:
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    optimizer = make_optimizer(weight, OptimizerSection(weight_decay=0.5), 0.1)
    weight.weight.grad = torch.full((1, 1), 3.0)
    optimizer.step()
    # decay: 1 - 0.1 * 0.5 = 0.95; the first Adam step has length lr whatever the gradient's size: 0.95 - 0.1 = 0.85
    assert abs(weight.weight.item() - 0.85) < 1e-6


def test_the_schedule_scales_every_group_by_its_own_peak() -> None:
    rates = {"inner.bias": 0.01, "bias": 0.02, "head": 0.04}  # the first that fits; a tied weight by either name
    optimizer = make_optimizer(Tied(), OptimizerSection(learning_rates=rates), 0.1)
    assert rates_by_pattern(optimizer) == rates
    set_learning_rate(optimizer, 0.05)  # half of the peak
    assert rates_by_pattern(optimizer) == pytest.approx({pattern: rate / 2 for pattern, rate in rates.items()})
    assert [group["lr"] for group in optimizer.param_groups if group["pattern"] is None] == pytest.approx([0.05, 0.05])


def test_parts_have_rates_of_their_own() -> None:
    """Patterns of weights take precedence; the last part is what is left; one that was not asked has the usual rate."""
    section = OptimizerSection(
        part_learning_rates={"projector": 0.01, "language": 0.04}, learning_rates={"inner.bias": 1}
    )
    parts = {"projector": ("inner",), "vision": ("norm", "nothing"), "language": ("*",)}
    groups = group_parameters(Tied(), section, 0.1, parts)
    rates = {name: (group["lr"], group["pattern"]) for group in groups for name, _ in group["params"]}
    assert rates == {
        "inner.weight": (0.01, "projector"),
        "inner.bias": (1, "inner.bias"),
        "norm.weight": (0.1, "vision"),
        "norm.bias": (0.1, "vision"),
        "embed.weight": (0.04, "language"),
    }


def test_patterns_may_take_all_of_a_part_that_was_given_no_rate() -> None:
    section = OptimizerSection(part_learning_rates={"language": 0.04}, learning_rates={"norm": 0.01})
    groups = group_parameters(Tied(), section, 0.1, {"vision": ("norm",), "language": ("*",)})
    rates = {name: group["lr"] for group in groups for name, _ in group["params"]}
    assert rates["norm.weight"] == rates["norm.bias"] == 0.01 and rates["inner.weight"] == 0.04


@pytest.mark.parametrize(
    ("rates", "why"), [({"outer": 0.1}, "no weight that is trained"), ({"*": 0.1, "inner": 0.1}, "before it")]
)
def test_a_pattern_that_chooses_nothing_is_refused(rates: dict[str, float], why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_optimizer(Tied(), OptimizerSection(learning_rates=rates), 0.1)


def test_a_part_that_patterns_leave_nothing_is_named_by_its_own_key() -> None:
    section = OptimizerSection(part_learning_rates={"vision": 0.04}, learning_rates={"norm": 0.01})
    with pytest.raises(UserError, match=r"'vision' of optimizer\.part_learning_rates chooses no") as caught:
        group_parameters(Tied(), section, 0.1, {"vision": ("norm",)})
    assert "narrow those patterns" in caught.value.fix


@pytest.mark.parametrize("shape", [(6, 6), (5, 40), (64, 16)])
def test_muon_is_the_one_of_torch(shape: tuple[int, int]) -> None:
    """Weights after five steps with decay; updates are rounded to bfloat16 in both."""
    ours, theirs = (nn.Linear(shape[1], shape[0], bias=False) for _ in range(2))
    ours.weight.data.copy_(theirs.weight)
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    published = torch.optim.Muon([theirs.weight], **options)
    section, model = OptimizerSection(name="muon", weight_decay=0.1), nn.ModuleDict({"block": ours})
    optimizer = make_optimizer(model, section, 0.02, blocks=["block"], compute_dtype=torch.bfloat16)
    for step in range(5):
        gradient = optimizer_ranks.draw(f"{step}", torch.Size(shape))
        for net, each in ((ours, optimizer), (theirs, published)):
            net.weight.grad = gradient.clone()
            each.step()
    update = 0.2 * 0.02 * max(shape) ** 0.5
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=0.02 * update)


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float32, 0.0, 2e-5), (torch.bfloat16, 1e-4, 1.0)])
@pytest.mark.parametrize("rank", [4, 48])
def test_a_gradients_last_digit_stays_one_in_float32(dtype: torch.dtype, least: float, most: float, rank: int) -> None:
    """Layouts sum gradients in another order. What becomes of it in bfloat16 is why the docstring claims no equality
    there.
    """
    nets = [nn.Linear(96, 48, bias=False) for _ in range(2)]
    for net in nets:
        nn.init.zeros_(net.weight)
    section, sizes = OptimizerSection(name="muon"), {"left": (48, rank), "right": (rank, 96), "noise": (48, 96)}
    optimizers = [
        make_optimizer(nn.ModuleDict({"block": net}), section, 0.02, blocks=["block"], compute_dtype=dtype)
        for net in nets
    ]
    for step in range(10):
        drawn = {name: optimizer_ranks.draw(f"{name} {step}", torch.Size(size)) for name, size in sizes.items()}
        for net, optimizer, noise in zip(nets, optimizers, (0.0, 1e-7), strict=True):
            net.weight.grad = drawn["left"] @ drawn["right"] * (1 + noise * drawn["noise"])
            optimizer.step()
    apart = ((nets[0].weight - nets[1].weight).norm() / nets[0].weight.norm()).item()
    assert least <= apart < most


def test_orthogonalized_singular_values_are_near_one() -> None:
    for shape in ((16, 64), (64, 16)):
        values = torch.linalg.svdvals(orthogonalize(optimizer_ranks.draw("m", torch.Size(shape)).bfloat16()).float())
        assert values.min() > 0.6 and values.max() < 1.3


def test_adafactor_is_the_published_one() -> None:
    """As transformers has it without scaling by the weights; matrices, vectors, and gradients that grow, when updates
    are cut, and shrink, when they are small and stay so.
    """
    ours, theirs = (nn.ModuleDict({"linear": nn.Linear(7, 5), "norm": nn.LayerNorm(9)}) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, OptimizerSection(name="adafactor"), 0.01)
    published = PublishedAdafactor(
        theirs.parameters(), lr=0.01, scale_parameter=False, relative_step=False, weight_decay=0.0
    )
    updates = []
    for step, size in enumerate((1.0, 10.0, 100.0, 30.0, 3.0, 1.0)):
        before = ours["linear"].weight.detach().clone()
        for net, each in ((ours, optimizer), (theirs, published)):
            for name, parameter in net.named_parameters():
                parameter.grad = optimizer_ranks.draw(f"{step} {name}", parameter.shape) * size
            each.step()
        updates.append(float((ours["linear"].weight.detach() - before).square().mean().sqrt()) / 0.01)
    assert max(updates) == pytest.approx(1.0, abs=1e-3) and min(updates) < 0.5  # at the bound, and below it
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7, msg=name)


def test_8bit_keeps_embeddings_vectors_and_small_matrices_in_float32() -> None:
    with optimizer_ranks.cpu_kernels():
        net, optimizer = optimizer_ranks.build(OptimizerSection(name="adamw_8bit"), "single")
        optimizer_ranks.take_step(net, optimizer, 0)
    dtypes = {name: optimizer.state[p]["exp_avg"].dtype for name, p in net.named_parameters() if p.requires_grad}
    assert {name for name, dtype in dtypes.items() if dtype == torch.uint8} == {
        f"block.{name}.weight" for name in ("wide", "tall", "odd")
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_the_kernels_update_as_bitsandbytes_own_classes_do(name: str) -> None:
    """Bit for bit, on a GPU: matrices large enough for 8 bits and for managed memory, a small one, a vector; with
    weight decay.
    """
    import bitsandbytes

    kinds = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW32bit", "paged_adamw_8bit": "PagedAdamW8bit"}
    ours, theirs = (
        nn.ModuleDict({"large": nn.Linear(300, 500), "small": nn.Linear(8, 8, bias=False)}).cuda() for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, OptimizerSection(name=name, weight_decay=0.1), 0.01)
    matrices, vectors = ([p for p in theirs.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    published = getattr(bitsandbytes.optim, kinds[name])(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    for step in range(5):
        for net, each in ((ours, optimizer), (theirs, published)):
            for key, parameter in net.named_parameters():
                parameter.grad = optimizer_ranks.draw(f"{step} {key}", parameter.shape).cuda()
            each.step()
    assert optimizer.state[ours["large"].weight]["exp_avg"].dtype == (
        torch.uint8 if name.endswith("8bit") else torch.float32
    )
    assert all(torch.equal(mine, other) for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True))
