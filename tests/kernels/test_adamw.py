"""AdamW in one pass: near a float64 reference, equal to torch's through a step, deterministic and unbiased where it
rounds.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.kernels.adamw import FusedAdamW, choose_backend
from manyhands.kernels.adamw import optimizer as adamw_optimizer
from manyhands.kernels.adamw.reference import (
    AdamWTensors,
    Rates,
    make_key,
    make_rows,
    mix,
    round_to_bfloat16,
    update_reference,
)
from manyhands.kernels.adamw.streamed import StreamedUpdate

CPU = torch.device("cpu")
BETAS, EPS, LR = (0.9, 0.95), 1e-8, 1e-2
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def draw(seed: int, size: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def reference(
    weight: torch.Tensor, gradients: list[torch.Tensor], decay: float, factor: float
) -> tuple[torch.Tensor, ...]:
    """Weight and moments in float64 after all steps."""
    w, m, v = weight.double(), torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
    for step, gradient in enumerate(gradients, start=1):
        g = gradient.double() * factor
        w = w - LR * decay * w
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
        w = w - LR / (1 - BETAS[0] ** step) * m / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
    return w, m, v


def build(
    weight: torch.Tensor, *, decay: float = 0.0, copies: bool = False, **options: Any
) -> tuple[nn.Parameter, FusedAdamW, Any]:
    parameter = nn.Parameter(weight.clone())
    parameter.grad_dtype = None
    computes = weight.bfloat16() if copies else None
    backend = "triton" if weight.device.type == "cuda" else "eager"
    held = {} if computes is None else {parameter: computes}
    options = {"backend": backend, "lr": LR, "betas": BETAS, "eps": EPS, "copies": held, **options}
    return parameter, FusedAdamW([{"params": [parameter], "weight_decay": decay}], **options), computes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 31, 1024, 5003])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decay", "factor"), [(0.0, None), (0.1, 0.25)])
def test_float32_weights_follow_the_reference(
    device: torch.device, size: int, gradient_dtype: torch.dtype, decay: float, factor: float | None
) -> None:
    start, gradients = draw(0, size, device), [draw(1 + step, size, device, gradient_dtype) for step in range(20)]
    parameter, optimizer, computes = build(start, decay=decay, copies=True)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.gradient_factor = None if factor is None else torch.tensor(factor, device=device)
        optimizer.step()
        assert optimizer.gradient_factor is None and torch.equal(parameter.grad, gradient)
    state = optimizer.state[parameter]
    for found, wanted in zip(
        (parameter, state["exp_avg"], state["exp_avg_sq"]),
        reference(start, gradients, decay, factor or 1.0),
        strict=True,
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.detach().double(), wanted, rtol=2e-6, atol=2e-6)
    assert torch.equal(computes, parameter.detach().bfloat16()) and state["step"].item() == 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_the_adamw_of_torch(device: torch.device, decay: float) -> None:
    """Each step from the same weights and moments: within two last digits of the weight and of the larger addend of a
    moment.
    """
    start = draw(0, 5003, device)
    ours, optimizer, _ = build(start, decay=decay)
    theirs = nn.Parameter(start.clone())
    published = torch.optim.AdamW([theirs], lr=LR, betas=BETAS, eps=EPS, weight_decay=decay, fused=True)
    for step in range(10):
        gradient = draw(1 + step, 5003, device)
        before = optimizer.state[ours]["exp_avg"].abs() if step else torch.zeros_like(start)
        for parameter, each in ((ours, optimizer), (theirs, published)):
            parameter.grad = gradient.clone()
            each.step()
        digit = torch.finfo(torch.float32).eps
        mine, other = optimizer.state[ours], published.state[theirs]
        assert mine.keys() == other.keys() and all(mine[key].dtype == other[key].dtype for key in other)
        assert ((ours - theirs).abs() <= 2 * digit * theirs.abs() + 2 * digit * LR * 10).all()
        assert ((mine["exp_avg"] - other["exp_avg"]).abs() <= 2 * digit * torch.maximum(before, gradient.abs())).all()
        assert ((mine["exp_avg_sq"] / other["exp_avg_sq"] - 1).abs() <= 4 * digit).all()
        assert mine["step"] == other["step"]
        with torch.no_grad():
            theirs.copy_(ours)
            for key in ("exp_avg", "exp_avg_sq"):
                other[key].copy_(mine[key])


def test_a_state_of_torchs_goes_on_here() -> None:
    start = draw(0, 100)
    ours, optimizer, _ = build(start, decay=0.1)
    theirs = nn.Parameter(start.clone())
    published = torch.optim.AdamW([{"params": [theirs], "weight_decay": 0.1}], lr=LR, betas=BETAS, eps=EPS, fused=True)
    for step in range(6):
        for parameter, each in ((ours, optimizer), (theirs, published)):
            parameter.grad = draw(1 + step, 100)
            each.step()
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(published.state_dict()))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert optimizer.state[ours]["step"] == 6


def test_a_weight_without_gradient_stays() -> None:
    parameter, optimizer, _ = build(draw(0, 10), copies=True)
    optimizer.step()
    assert torch.equal(parameter, draw(0, 10)) and not optimizer.state[parameter]


# -- weights in bfloat16


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_weights_follow_the_reference_and_have_states_in_bfloat16(device: torch.device) -> None:
    start, gradients = (
        draw(0, 5003, device, torch.bfloat16),
        [draw(1 + step, 5003, device, torch.bfloat16) for step in range(20)],
    )
    parameter, optimizer, _ = build(start, decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    state = optimizer.state[parameter]
    assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype, parameter.dtype} == {torch.bfloat16}
    wanted = reference(start, gradients, 0.1, 1.0)
    error, moved = (parameter.detach() - wanted[0]), wanted[0] - start.double()
    # each step rounds by at most one digit, with a deviation of half of one: 20**.5 times that in all, and no drift
    deviation = 0.5 * torch.finfo(torch.bfloat16).eps * wanted[0].abs() * 20**0.5
    assert (error.norm() < deviation.norm()) and error.norm() < 0.3 * moved.norm()
    assert error.mean().abs() < 4 * deviation.square().mean().sqrt() / len(error) ** 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_small_updates_are_made_on_average(device: torch.device) -> None:
    """Each of 100 updates is 1e-5 of weights that have neighbours 8e-3 apart; to the nearest, none of them would be
    seen.
    """
    parameter, optimizer, _ = build(torch.ones(200_000, device=device, dtype=torch.bfloat16), lr=1e-5)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    values = parameter.detach().double()
    # a step of 2**-8 below 1 is made with probability 1e-5 / 2**-8: the mean of 100 has deviation 100**.5 * (1e-5 *
    # 2**-8)**.5 / n**.5
    assert abs(values.mean().item() - (1 - 1e-3)) < 4 * (100 * 1e-5 * 2**-8 / len(values)) ** 0.5
    assert values.unique().numel() > 1


@pytest.mark.parametrize("device", DEVICES)
def test_second_moments_in_bfloat16_do_not_drift(device: torch.device) -> None:
    """Rounded up as often as their distance asks for: after one step they are those of float64 on average."""
    gradient = draw(3, 200_000, device, torch.bfloat16)
    parameter, optimizer, _ = build(torch.ones_like(gradient))
    parameter.grad = gradient
    optimizer.step()
    wanted = (1 - BETAS[1]) * gradient.double() ** 2
    error = (optimizer.state[parameter]["exp_avg_sq"].double() / wanted - 1)[gradient != 0]
    assert error.abs().max() <= 2**-7 and error.mean().abs() < 4 * 2**-8 / len(error) ** 0.5


def test_rounding_is_unbiased_and_leaves_what_is_no_number() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-9, -(1.0 + 3 * 2**-10), 3e-39, -7.7e5]).repeat(65536, 1)
    bits = torch.arange(65536)[:, None].expand_as(values)
    rounded = round_to_bfloat16(values, bits)
    assert torch.equal(rounded, rounded.bfloat16().float())
    torch.testing.assert_close(rounded.double().mean(0), values[0].double(), rtol=1e-7, atol=0)
    strange = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(round_to_bfloat16(strange, torch.full((3,), 65535)), strange) or strange.isnan().any()
    assert round_to_bfloat16(strange, torch.full((3,), 65535)).isnan().tolist() == [False, False, True]


def rounded_step(seed: int = 0, index: int = 0, count: float = 1.0, first: int = 0, size: int = 4096) -> torch.Tensor:
    weight, gradient = torch.full((first + size,), 1.003).bfloat16()[first:], torch.ones(size)
    key = torch.tensor(make_key(seed, index, first), dtype=torch.int32)
    row = make_rows(torch.tensor([count]), 1e-3, 0.0, 0.0)[0]
    part = AdamWTensors(weight, gradient, torch.zeros_like(weight), torch.zeros_like(weight), row, key=key)
    update_reference(part, Rates(0.0, 0.0, EPS, 0.0), None)
    return weight.clone()


def test_rounding_follows_from_seed_parameter_step_and_element_alone() -> None:
    base = rounded_step()
    assert torch.equal(rounded_step(), base) and len(base.unique()) == 2
    others = [rounded_step(seed=1), rounded_step(index=1), rounded_step(count=2.0), rounded_step(first=4096)]
    assert all(0.2 < (other != base).double().mean() < 0.8 for other in others)
    # the part of a rank that has elements from 1000 on gets what it would get in the whole
    assert torch.equal(rounded_step(first=1000, size=3096), base[1000:])


def test_every_bit_of_the_index_reaches_every_random_bit() -> None:
    words = torch.randint(2**32, (4000,), generator=torch.Generator().manual_seed(0))
    for bit in range(32):
        changed = mix(words) ^ mix(words ^ (1 << bit))
        shares = torch.stack([(changed >> place & 1).double().mean() for place in range(32)])
        assert (shares - 0.5).abs().max() < 0.06


# -- the kernel


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_is_the_reference_as_triton_interprets_it() -> None:
    """In a process of its own, as Triton decides at import. Its interpreter cuts bfloat16 off where a GPU rounds."""
    code = (
        "import torch; from manyhands.kernels.adamw import reference, triton; "
        "print(triton.compare(torch.device('cpu'), reference.update_reference))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert float(done.stdout.split()[-1]) < 1.0


@pytest.mark.gpu
def test_a_gpu_takes_triton() -> None:
    from manyhands.kernels.adamw import triton

    device = torch.device("cuda")
    assert choose_backend(device).name == "triton", choose_backend(device).reason
    assert triton.compare(device, update_reference) < 0.5


def test_a_cpu_takes_plain_torch() -> None:
    assert choose_backend(CPU).name == "eager" and "cpu" in choose_backend(CPU).reason


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_host", ["everything", "the states"])
def test_what_is_in_host_memory_is_updated_a_slice_at_a_time_with_the_same_bits(
    device: torch.device, on_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of one size, one that is left over, and a parameter shorter than a slice, clipped and rounded."""
    monkeypatch.setattr(adamw_optimizer, "StreamedUpdate", partial(StreamedUpdate, slice_elements=700, num_slots=2))
    home = CPU if on_host == "everything" else device
    starts = [draw(seed, size, CPU, torch.bfloat16) for seed, size in enumerate((5003, 1400, 64))]

    def make(where: torch.device, **options: Any) -> tuple[list[nn.Parameter], FusedAdamW]:
        backend = "triton" if device.type == "cuda" else "eager"
        weights = [nn.Parameter(place(start.clone(), where)) for start in starts]
        groups = [{"params": weights, "weight_decay": 0.1}]
        return weights, FusedAdamW(groups, backend=backend, lr=LR, betas=BETAS, eps=EPS, seed=3, **options)

    def place(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
        return tensor.pin_memory() if where == CPU and device.type == "cuda" else tensor.to(where)

    first_index = {"first_index": lambda _: 2**33 - 900}  # the slices' own indices pass a multiple of 2**32
    plain, streamed = make(device, **first_index), make(home, stream_to=device, **first_index)
    for step in range(4):
        for where, (weights, optimizer) in ((device, plain), (home, streamed)):
            for index, weight in enumerate(weights):
                weight.grad = place(draw(100 * step + index, weight.numel(), CPU, torch.bfloat16), where)
            optimizer.gradient_factor = torch.tensor(0.5, device=device)
            optimizer.step()
    for mine, other in zip(streamed[0], plain[0], strict=True):
        assert mine.device.type == home.type and torch.equal(mine.cpu(), other.cpu())
        for name in ("exp_avg", "exp_avg_sq"):
            state = streamed[1].state[mine][name]
            assert state.device == CPU and torch.equal(state, plain[1].state[other][name].cpu())
            assert state.is_pinned() == (device.type == "cuda")
    assert not torch.equal(plain[0][0].cpu(), starts[0])


def test_parameters_updated_one_by_one_take_the_same_step() -> None:
    """The first two by themselves, the last by ``step``; each with the rate that was set for that step."""
    starts = [draw(seed, size, CPU, torch.bfloat16) for seed, size in enumerate((5003, 1400, 64))]
    runs = []
    for _ in range(2):
        weights = [nn.Parameter(start.clone()) for start in starts]
        groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
        runs.append((weights, FusedAdamW(groups, backend="eager", lr=LR, betas=BETAS, eps=EPS, stream_to=CPU)))
    (plain, all_at_once), (single, one_by_one) = runs
    for step in range(3):
        gradients = [draw(100 * step + index, len(start), CPU, torch.bfloat16) for index, start in enumerate(starts)]
        for optimizer in (all_at_once, one_by_one):
            for group in optimizer.param_groups:
                group["lr"] = LR / (step + 1)
        one_by_one.prepare_updates()
        for weight, gradient in zip(single[:2], gradients, strict=False):
            one_by_one.update(weight, gradient)
        single[2].grad = gradients[2]
        for weight, gradient in zip(plain, gradients, strict=True):
            weight.grad = gradient
        all_at_once.step()
        one_by_one.step()
    for mine, other in zip(single, plain, strict=True):
        assert torch.equal(mine, other) and one_by_one.state[mine].keys() == all_at_once.state[other].keys()
        assert all(
            torch.equal(one_by_one.state[mine][name], all_at_once.state[other][name])
            for name in all_at_once.state[other]
        )
    assert not torch.equal(plain[0], starts[0])


@pytest.mark.gpu
def test_on_a_gpu_slices_pass_each_other_and_none_is_lost() -> None:
    """Large enough that copies, updates and copies back really overlap."""
    device, size = torch.device("cuda"), 3 * 2**24 + 5
    start = draw(0, size, CPU, torch.bfloat16)
    plain, streamed = (
        FusedAdamW([nn.Parameter(weight)], backend="triton", lr=LR, betas=BETAS, eps=EPS, **options)
        for weight, options in ((start.to(device), {}), (start.clone().pin_memory(), {"stream_to": device}))
    )
    for step in range(3):
        gradient = draw(1 + step, size, CPU, torch.bfloat16)
        for optimizer, placed in ((plain, gradient.to(device)), (streamed, gradient.pin_memory())):
            optimizer.param_groups[0]["params"][0].grad = placed
            optimizer.step()
    mine, other = (optimizer.param_groups[0]["params"][0] for optimizer in (streamed, plain))
    assert torch.equal(mine.to(device), other)
