"""The time estimate term by term: against arithmetic by hand, and in the plan that shows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from manyhands.bench.rows import mix_lengths
from manyhands.facts.gpu_kinds import describe_host, load_kinds, parse_gpus
from manyhands.facts.types import Calibration, LinearShape
from manyhands.planner.memory import terms as memory
from manyhands.planner.memory.host import fetched_alone
from manyhands.planner.search import base_input, plan
from manyhands.planner.time import terms as time
from manyhands.planner.time.collectives import gathers
from manyhands.planner.time.input import TimeInput
from manyhands.planner.time.rates import load_fitted, load_reference, rates_of, rates_of_kind
from manyhands.planner.time.work import MeanStep, MicroBatchGroup, count_pairs, join_sizes, mean_work, work_of_lengths
from tests.planner.examples import data_facts, facts, llama_8b, mixture, run_config
from tests.support.plans import change_input, make_input

H200 = next(kind for kind in load_kinds() if kind.name == "H200")
FITTED = load_fitted()
RATES = rates_of_kind(H200, FITTED)
LORA = change_input(make_input(llama_8b(), num_adapter_parameters=1000, adapter_rank=16), full_micro_tokens=8192)
FULL = change_input(LORA, num_adapter_parameters=0)
MICRO = MicroBatchGroup(1.0, 8192, 4096 * 8192, 4096 * 8192)
WEIGHTS = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336  # of a block


def asked(setup=LORA, *micros: MicroBatchGroup, **changes) -> TimeInput:
    work = MeanStep(micros or (MICRO,), 8192, 2)
    return replace(TimeInput(setup, work, RATES, FITTED, "varlen", num_local=setup.layout.world_size), **changes)


def test_one_micro_batch_in_each_step_is_one_in_the_mean() -> None:
    """Where it is one, gradients in host memory are used before they leave: 22 times 1/22 must not be less."""
    layout = make_input(llama_8b()).layout
    for num_steps in range(1, 70):
        steps = [[[np.array([100])]] for _ in range(num_steps)]
        assert work_of_lengths(steps, layout, None).num_micro == 1


def test_large_matmuls_take_their_operations_and_small_ones_whole_waves_of_tiles():
    s = asked()
    assert time.matmul_s(s, 8192, 14336, 4096) == pytest.approx(2 * 8192 * 14336 * 4096 / RATES.matmul)
    one, all_of_them = time.matmul_s(s, 128, 256, 512), time.matmul_s(s, 128 * 132, 256, 512)
    assert one == pytest.approx(all_of_them, rel=0.2), "one tile takes as long as one for each multiprocessor"
    assert time.matmul_s(s, 8192, 16, 4096) >= 2 * 8192 * 4096 / RATES.memory, "narrow ones read their input"


def test_trained_weights_have_a_third_matmul():
    lora, full = (time.matmuls(asked(setup), MICRO) for setup in (LORA, FULL))
    floor = 32 * 2 * 8192 * WEIGHTS / RATES.matmul
    assert full == pytest.approx(3 * floor, rel=0.03)
    assert 2 * floor < lora < 2.2 * floor


def test_more_micro_batches_have_more_kernels_of_the_same_tokens():
    """Measured on an H100: 14.5 ms for one more micro-batch of 8B with adapters, beside matmuls that take no longer."""
    whole, half = replace(MICRO, tokens=8192.0), replace(MICRO, tokens=4096.0)
    on_gpu = asked(change_input(LORA, device="cuda"))
    more = 2 * time.elementwise(on_gpu, half) - time.elementwise(on_gpu, whole)
    assert 0.010 < more < 0.020
    on_cpu = asked(LORA if LORA.layout.device == "cpu" else change_input(LORA, device="cpu"))
    assert 2 * time.elementwise(on_cpu, half) == pytest.approx(time.elementwise(on_cpu, whole))


def test_attention_counts_the_pairs_of_each_sample_alone():
    assert count_pairs(np.array([4, 2])) == 10 + 3
    assert count_pairs(np.array([4, 2]), window=2) == (1 + 2 + 2 + 2) + 3
    packed = work_of_lengths([[[np.array([100, 28]), np.array([60])]]], replace(LORA.layout, micro_tokens=256), None)
    (micro,) = packed.micros
    assert (micro.tokens, micro.pairs, packed.num_tokens) == (128, 5050 + 406, 188), "of the rank that has most"
    one, two, three = (time.attention(asked(), replace(MICRO, pairs=factor * MICRO.pairs)) for factor in (1, 2, 3))
    assert one < two < 2 * one and three - two == pytest.approx(two - one)


def test_answers_of_a_pair_do_not_see_each_other():
    pair, layout = [[[np.array([4096])]]], replace(LORA.layout, micro_tokens=4096)
    (micro,) = work_of_lengths(pair, layout, 100, documents=2).micros
    two = np.array([2048, 2048])
    assert (micro.pairs, micro.window_pairs) == (count_pairs(two), count_pairs(two, 100))
    data = data_facts(num_samples=100, mean=4096, longest=4096).model_copy(update={"num_documents": 2})
    (mean,) = mean_work(layout, data, samples=1, tokens=None, window=None).micros
    assert mean.pairs == count_pairs(two)


def test_a_reference_is_a_forward_pass_of_the_model_without_its_adapters():
    """In each step with adapters switched off; stored, before the first step, over what the run reads once."""
    model = LORA.model
    blocks = sum(2 * 8192 * shape.size for shape in model.block_linear_shapes.values()) * model.num_layers
    head = 2 * 8192 * model.vocab_size * model.hidden_size
    off = asked(change_input(LORA, reference="adapters"))
    least = (blocks + head) / RATES.matmul + time.all_attention(off, MICRO, backward=False)
    assert least < time.reference(off) < 1.25 * least and time.reference(asked()) == 0
    sharded = change_input(LORA, world_size=8, strategy="fsdp", reshard_after_forward=True)
    assert [gathers(asked(replace(sharded, reference=each))) for each in ("stored", "adapters")] == [2, 3]

    def times(**keys):
        data = data_facts(num_samples=2000, mean=2000, longest=2048).model_copy(update={"num_documents": 2})
        machine = facts(llama_8b(), gpus=1, gpu_bytes=140 * 2**30, data=data)
        found = plan(run_config(task="preference", batch__samples=8, **keys), machine)
        return found.reference, found.time

    (off, once), (stored, twice) = times(), times(stop__epochs=2)
    assert (off, stored) == ("adapters", "stored")
    assert once.terms["reference"] == pytest.approx(once.step_s - twice.step_s, rel=1e-3)
    assert twice.start_s - once.start_s == pytest.approx(once.terms["reference"] * 250, rel=0.1)


def test_losses_of_answers_are_not_fused_with_a_trained_head() -> None:
    data = data_facts(num_samples=2000, mean=2000, longest=2048)
    machine = facts(llama_8b(), gpus=8, gpu_bytes=80 * 2**30, data=data)

    def head(**keys) -> float:
        return plan(run_config(batch__samples=16, preference__reference="stored", **keys), machine).time.terms["head"]

    lora, full = ({"method__name": name} for name in ("lora", "full"))
    assert head(task="preference", **lora) == pytest.approx(head(**lora), rel=1e-6)
    assert head(task="preference", **full) > 1.05 * head(**full)


def test_a_value_of_the_whole_step_is_a_pass_through_the_model_and_one_through_its_reference():
    """KTO's KL: answers to others' prompts, as many tokens as the step has, before the pass that is trained."""
    off = asked(change_input(LORA, reference="adapters", num_values=1))
    assert time.values(off) == pytest.approx(time.forward(off, MICRO) + time.reference(off))
    assert time.values(asked(change_input(LORA, reference="adapters"))) == 0
    quantized = [asked(change_input(LORA, nf4_blocks=True, num_values=n, reference="adapters")) for n in (0, 1)]
    none, one = map(time.dequantization, quantized)
    assert one / none == pytest.approx(5 / 3), "forward, backward, reference; and for the value two"
    sharded = change_input(LORA, world_size=8, strategy="fsdp", reshard_after_forward=True, reference="adapters")
    assert [gathers(asked(replace(sharded, num_values=n))) for n in (0, 1)] == [3, 5]
    data = data_facts(num_samples=2000, mean=2000, longest=2048)
    machine = facts(llama_8b(), gpus=1, gpu_bytes=140 * 2**30, data=data)
    sft, kto = (plan(run_config(task=task, batch__samples=8), machine).time for task in ("sft", "kto"))
    assert kto.evaluation_s == pytest.approx(4 * sft.evaluation_s, rel=1e-4)
    assert kto.terms["values"] == pytest.approx(2 * kto.terms["reference"], rel=0.1)
    assert kto.step_s - sft.step_s == pytest.approx(kto.terms["reference"] + kto.terms["values"], rel=0.05)


def test_micro_batches_of_as_many_tokens_are_one_with_the_mean_of_their_pairs():
    """Steps of mixed lengths have hundreds, and a plan with advice looked at each of them for 11 s."""
    packs = [np.array([100, 28]), np.array([64, 64]), np.array([128]), np.array([60])]
    layout = replace(LORA.layout, micro_tokens=128)
    merged = work_of_lengths([[[pack] for pack in packs]], layout, None).micros
    alone = [micro for pack in packs for micro in work_of_lengths([[[pack]]], layout, None).micros]
    assert len(merged) < len(alone) == 4
    for term in (time.attention, time.matmuls, time.recomputation):
        found, wanted = (sum(micro.count * term(asked(), micro) for micro in micros) for micros in (merged, alone))
        assert found == pytest.approx(wanted, rel=1e-12)


def test_a_plan_of_mixed_lengths_has_the_mean_step_of_the_data():
    """Its steps are drawn from all that the run has; of 16 samples each, six missed the mean tokens by a tenth."""
    lengths = tuple(mix_lengths(2048))
    data = data_facts(num_samples=2048, mean=float(np.mean(lengths)), longest=max(lengths), first_lengths=lengths)
    made = plan(run_config(method__name="lora", batch__samples=16), facts(llama_8b(), gpus=1, data=data))
    mean = 16 * float(np.mean(lengths))
    assert made.time.tokens_per_s * made.time.step_s == pytest.approx(mean, rel=0.02)
    short = plan(
        run_config(method__name="lora", batch__samples=16, stop__max_steps=5), facts(llama_8b(), gpus=1, data=data)
    )
    assert short.time.tokens_per_s * short.time.step_s == pytest.approx(sum(lengths[:80]) / 5, rel=1e-4)
    packs = [[[np.array(lengths[i : i + 16])]] for i in range(0, 2048, 16)]
    whole = work_of_lengths(packs, replace(LORA.layout, micro_tokens=2**20), None)
    joined = join_sizes(whole, 8)
    assert len(joined.micros) == 8 < len(whole.micros) and joined.num_micro == whole.num_micro == 1
    for term in (time.attention, time.matmuls, time.elementwise, time.head):
        found, wanted = (sum(m.count * term(asked(), m) for m in work.micros) for work in (joined, whole))
        assert found == pytest.approx(wanted, rel=0.002)


def test_recomputation_repeats_the_forward_pass_or_parts_of_it():
    modes = ("none", "selective", "except_attention", "full")
    none, selective, most, full = (
        time.recomputation(asked(change_input(LORA, activation_checkpointing=mode)), MICRO) for mode in modes
    )
    assert none == 0 < selective < most < full
    eager = change_input(LORA, activation_checkpointing="selective", compile=False)
    again = 32 * time.block_elementwise(asked(eager), 8192, backward=False)
    assert time.recomputation(asked(eager), MICRO) == pytest.approx(again), "no kernel of the backward pass has them"
    forward = 32 * (
        time.block_matmuls(asked(), 8192, backward=False) + time.block_elementwise(asked(), 8192, backward=False)
    )
    assert most == pytest.approx(forward)
    assert full == pytest.approx(forward + time.all_attention(asked(), MICRO, backward=False))
    half = change_input(LORA, activation_checkpointing="full", lighter_layers=16)
    assert selective < time.recomputation(asked(half), MICRO) < full


def test_collectives_hide_behind_compute_and_slow_it():
    two = change_input(FULL, strategy="fsdp", world_size=2, reshard_after_forward=False)
    again = change_input(two, reshard_after_forward=True)
    hidden, alone = time.communication(asked(two), 100.0), time.communication(asked(two), 0.0)
    assert 0 < hidden < alone
    assert time.communication(asked(again), 0.0) > alone, "weights are gathered twice"
    far = time.communication(asked(two, num_local=1), 0.0)
    assert far > 2 * alone, "machines are linked more slowly than GPUs"
    assert time.communication(asked(), 1.0) == 0
    # a gather of half of all weights in bfloat16, a reduction of half of their gradients in float32
    moved = llama_8b().num_parameters * (2 + 4) / 2
    assert alone == pytest.approx(moved / RATES.link, rel=0.05)


def test_deepspeed_sums_whole_buckets_copies_them_and_waits_before_the_update():
    fsdp, zero2, zero3 = (
        change_input(FULL, strategy=strategy, world_size=2, reshard_after_forward=strategy == "zero3")
        for strategy in ("fsdp", "zero2", "zero3")
    )
    weights = llama_8b().num_parameters
    # float32 sums of all gradients there and back; half of all weights, gathered after the update
    assert time.communication(asked(zero2), 0.0) == pytest.approx(weights * (4 + 2 / 2) / RATES.link, rel=0.05)
    assert time.copies(asked(zero2)) == pytest.approx(weights * (20 + 25 / 2) / RATES.memory, rel=0.1)
    eager2, eager3 = (change_input(setup, compile=False) for setup in (zero2, zero3))
    assert time.host(asked(eager3)) > 2.5 * time.host(asked(eager2)), "hooks of every module"
    assert time.waiting(asked(zero2), 0.0) > time.waiting(asked(fsdp), 0.0)
    long_update = time.waiting(asked(zero2), 1.0)
    assert long_update == time.waiting(asked(fsdp), 1.0), "kernels that take longer than their launches hide them"


def test_sums_of_micro_batches_are_counted_from_the_second_one_on():
    cast = change_input(FULL, compute_copy="kept")
    once, twice, thrice = (time.accumulation(asked(cast, replace(MICRO, count=count))) for count in (1.0, 2.0, 3.0))
    assert once == 0 < twice < thrice < 2 * twice
    sharded = change_input(FULL, strategy="fsdp", world_size=2)
    later = 12 * sharded.num_trained / 2 / RATES.memory
    assert time.accumulation(asked(sharded, replace(MICRO, count=2.0))) == pytest.approx(later)


def test_many_small_micro_batches_wait_for_the_host():
    small = MicroBatchGroup(64.0, 128, 128 * 64, 128 * 64)
    terms = time.estimate_step(asked(LORA, small))
    assert terms["host"] > 0.5 * sum(terms.values())
    assert time.estimate_step(asked())["host"] < 0.02


def test_a_step_waits_for_its_input_where_collation_is_slower():
    assert time.estimate_step(asked())["input"] == 0
    assert sum(time.estimate_step(asked(collate_tokens_s=1000.0)).values()) == pytest.approx(8.192)


def test_a_calibrated_machine_is_as_fast_as_it_was_measured():
    measured = {"small_matmul_tflops": 1, "attention_tflops": 1, "memory_gb_s": 1, "pcie_gb_s": 1, "launch_us": 1}
    same = Calibration.model_validate(measured | {"matmul_tflops": 1} | load_reference())
    assert rates_of(H200, same, FITTED).matmul == pytest.approx(RATES.matmul)
    slow = same.model_copy(update={"matmul_tflops": same.matmul_tflops / 2})
    rates = rates_of(None, slow, FITTED)
    assert rates.matmul == pytest.approx(RATES.matmul / 2) and rates.source == "measured"
    assert rates_of(H200, None, FITTED) == RATES


@pytest.mark.parametrize(("method", "gpus"), [("lora", "1xH200"), ("full", "8xH200"), ("qlora", "2x8xH100")])
def test_the_plan_says_how_long_a_step_and_the_run_take(method, gpus):
    machine = facts(llama_8b(), data=data_facts(num_samples=5000)).model_copy(
        update={"host": describe_host(parse_gpus(gpus))}
    )
    made = plan(run_config(method__name=method), machine)
    assert made.time is not None and made.step_s == made.time.step_s
    assert made.step_s == pytest.approx(sum(made.time.terms.values()), rel=1e-4)
    assert made.time.total_s > made.num_steps * made.step_s
    assert made.time.gpu_hours == pytest.approx(made.time.total_s * made.layout.world_size / 3600, rel=1e-4)
    assert 0.05 < made.time.mfu < 0.7 and made.time.source == "datasheet"
    (chosen,) = (c for c in made.candidates if c.chosen)
    assert chosen.step_s == pytest.approx(made.step_s, rel=1e-4)
    safe = [c for c in made.candidates if c.memory.is_safe]
    assert made.step_s <= 1.003 * min(c.step_s for c in safe)


@pytest.mark.parametrize(
    ("every", "number"),
    [
        ({"evaluate__every_steps": 3}, 5),  # before step 1, after 3, 6, 9 and 12, the last of all
        ({"evaluate__every_steps": 5}, 4),  # 0, 5, 10, 12
        ({"evaluate__every_steps": 0}, 2),
        ({"evaluate__every_steps": 3, "evaluate__at_start": False}, 4),
        ({"evaluate__per_epoch": 2}, 3),
        ({"evaluate__per_epoch": 50}, 13),  # after every step
    ],
)
def test_evaluations_are_counted_as_the_run_makes_them(every: dict[str, object], number: int):
    machine = facts(llama_8b(), data=data_facts(num_samples=96)).model_copy(
        update={"host": describe_host(parse_gpus("H100"))}
    )
    made = plan(run_config(batch__samples=8, **every), machine)
    assert made.num_steps == 12 and made.time is not None
    assert made.time.num_evaluations == number


def test_nothing_is_said_of_a_cpu():
    made = plan(run_config(), facts())
    assert made.step_s is None and made.time is None


def test_one_gpu_waits_for_the_first_weights_from_host_memory_and_fetches_the_others_ahead():
    """Nothing computes before the root's and the first block's are there; several ranks prefetch all of them."""
    one = change_input(FULL, offload="all", device="cuda", reshard_after_forward=True)
    two = change_input(one, strategy="fsdp", world_size=2)
    compute = 1e3  # seconds: enough to hide any copy
    first = 2 * (one.num_root_parameters + one.model.num_block_parameters) / RATES.pcie
    rest = 2 * 2 * one.model.num_layers * one.model.num_block_parameters - 2 * one.model.num_block_parameters
    moved = rest + one.num_trained * one.sum_bytes
    assert time.offload(asked(one), compute) == pytest.approx(first + 0.03 * moved / RATES.pcie)
    assert time.offload(asked(one), 0.0) == pytest.approx(first + moved / RATES.pcie)
    assert time.offload(asked(two), compute) < 0.03 * 2 * (moved / RATES.pcie + first)
    unhidden = fetched_alone(change_input(one, device="cpu"), 3, 6, 1000)
    assert unhidden == (6000, 0), "FSDP2 alone fetches none ahead"


@pytest.mark.parametrize(
    ("leaves_once", "layout"),
    [(False, {}), (True, {"reduce_every": False}), (True, {"strategy": "hsdp", "shard_degree": 2})],
)
def test_gradients_go_to_host_memory_as_often_as_they_are_reduced(leaves_once: bool, layout: dict[str, object]):
    """``NativeEngine`` reduces unsharded ones, and sums of replicas, with a step's last micro-batch alone."""
    s = change_input(FULL, offload="all", device="cuda", **{"strategy": "fsdp", "world_size": 4} | layout)
    kept = replace(s, layout=replace(s.layout, reshard_after_forward=False))
    one, two = (time.offload(asked(kept, *[MICRO] * count), 0.0) for count in (1, 2))
    weights = 2 * s.model.num_parameters / s.num_shards
    more = weights + (0 if leaves_once else s.num_trained * s.sum_bytes / s.num_shards)
    assert two - one == pytest.approx(more / RATES.pcie, rel=0.01)


def test_the_norm_of_gradients_in_host_memory_costs_a_pass_over_them_where_they_are_sums():
    """Of one micro-batch it is taken before they leave."""
    narrow = change_input(FULL, offload="all", device="cuda", master_dtype="bfloat16", accumulates=False)
    alone, shared = (
        time.optimizer(asked(setup)) * setup.num_shards
        for setup in (narrow, change_input(narrow, strategy="fsdp", world_size=2))
    )
    assert shared - alone == pytest.approx(2 * narrow.num_trained / RATES.pcie)


def test_gpus_of_a_machine_share_its_host_memory():
    """Llama-70B in full on four H200s: 71 GB in and as much out at the same time took each of them 2.6 s."""
    half = change_input(FULL, offload="optimizer", device="cuda", master_dtype="bfloat16", accumulates=False)
    one, two, four, eight = (
        time.optimizer(asked(change_input(half, strategy="fsdp", world_size=n), num_local=n)) * n for n in (1, 2, 4, 8)
    )
    assert one == pytest.approx(two) and four - two == pytest.approx(4 * half.num_trained * (1 / 27e9 - 1 / RATES.pcie))
    assert eight - two == pytest.approx(4 * half.num_trained * (1 / 13.5e9 - 1 / RATES.pcie))


def test_weights_in_host_memory_are_updated_beside_the_backward_pass_where_nothing_needs_all_gradients_first():
    """Clipping does, and so does a second micro-batch, whose gradients are added."""
    narrow = change_input(FULL, offload="all", device="cuda", master_dtype="bfloat16", accumulates=False)
    free, compute = change_input(narrow, needs_all_gradients=False), 1e3  # seconds: enough to hide any copy
    on_host = narrow.num_trained * (2 + 6) / RATES.pcie  # gradients, and what is in and out at the same time
    assert time.optimizer(asked(narrow)) - time.optimizer(asked(free)) == pytest.approx(on_host)
    assert time.offload(asked(free), compute) - time.offload(asked(narrow), compute) < 0.03 * on_host
    several = [asked(setup, MICRO, MICRO) for setup in (narrow, free)]
    assert time.optimizer(several[0]) == time.optimizer(several[1])
    unclipped = {"optimizer__max_grad_norm": 0.0}
    found = [
        base_input(run_config(**keys), facts()).needs_all_gradients
        for keys in ({}, unclipped, unclipped | {"guards__nonfinite": "skip"}, unclipped | {"guards__spike": "skip"})
    ]
    assert found == [True, False, True, True]


@pytest.mark.parametrize(("name", "gigabytes"), [("H200", 50), ("A100-80GB", 25), ("T4", 12.5)])
def test_copies_to_host_memory_take_what_the_kinds_pcie_moves(name: str, gigabytes: float):
    kind = next(kind for kind in load_kinds() if kind.name == name)
    assert rates_of_kind(kind, FITTED).pcie == gigabytes * 1e9


def test_stacks_in_fp8_are_transposed_once_a_step_and_multiply_faster() -> None:
    """A byte read and one written a value, in place of both ways to bfloat16, and a copy of half the bytes."""
    kept = make_input(mixture(), num_adapter_parameters=1000, adapter_rank=16, fp8_blocks=True, fp8_weights=True)
    dequantized, in_fp8 = (asked(change_input(kept, fp8_groups=groups)) for groups in (False, True))
    assert time.dequantization(dequantized) == pytest.approx(3 * time.dequantization(in_fp8))
    shape = LinearShape(128 * 1536, 2048, groups=128, active=8)
    assert time.grouped_s(dequantized, 8192, shape) > 1.3 * time.grouped_s(in_fp8, 8192, shape)
    stack = max(shape.size for shape in mixture().block_linear_shapes.values() if shape.groups > 1)
    assert memory.dequantized(dequantized.estimate) - memory.dequantized(in_fp8.estimate) == stack


def test_few_rows_an_expert_multiply_slower_than_many() -> None:
    """Tiles are part empty, and weights are read behind less work: 459, 600 TFLOP/s with 256, 512 rows on an H200."""
    s = asked(make_input(mixture(), num_adapter_parameters=1000, adapter_rank=16))
    shape = LinearShape(128 * 1536, 2048, groups=128, active=8)
    rates = [2.0 * tokens * 8 * 1536 * 2048 / time.grouped_s(s, tokens, shape) for tokens in (4096, 8192, 65536)]
    assert rates[0] < 0.85 * rates[1] and rates[1] < rates[2] < s.rates.matmul
