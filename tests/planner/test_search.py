"""What is chosen, that explicit keys are obeyed, and what is said when nothing fits."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from manyhands.core.errors import UserError
from manyhands.core.units import compare_gib, format_gib
from manyhands.facts.types import Facts, GpuFacts
from manyhands.planner.choices import fuses_optimizer
from manyhands.planner.converters import Case, choose_converters
from manyhands.planner.oom import LAYOUT_FIELDS, NothingSmaller
from manyhands.planner.search import plan
from manyhands.planner.text import explain
from manyhands.planner.types import MemoryFound, Plan, reason
from tests.planner.examples import GIB, H200_BYTES, data_facts, facts, llama_1b, llama_8b, model_facts, run_config
from tests.support.plans import explain_why

LONG = data_facts(num_samples=5000, mean=3000, longest=4096)


def h200(gpus: int, **more) -> Facts:
    return facts(llama_8b(), gpus=gpus, data=LONG, **more)


def chosen(made: Plan):
    (candidate,) = (candidate for candidate in made.candidates if candidate.chosen)
    return candidate


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_8b_lora_on_h200s_keeps_a_copy_and_its_activations(gpus):
    made = plan(run_config(), h200(gpus))
    assert made.layout.world_size == gpus
    assert (made.layout.strategy, made.layout.activation_checkpointing, made.layout.reshard_after_forward) == (
        "single" if gpus == 1 else "ddp",
        "none",
        False,
    )
    assert made.layout.compute_dtype == made.layout.frozen_dtype == "bfloat16"
    assert (made.attention, made.layout.compile) == ("varlen", True)
    # 12,288 is as fast as 16,384 within what the estimate can tell, and needs a fifth less memory
    assert made.layout.micro_tokens in ((12_288, 16_384) if gpus < 8 else (15_104,))
    assert made.memory.is_safe
    assert made.learning_rate == 2e-4
    assert made.output_dtype == "float32"


def test_8b_full_fits_one_h200_in_one_way_only():
    """16 bytes of states a parameter are 119.7 GiB; the bfloat16 copy of all blocks beside them would be too much."""
    made = plan(run_config(method__name="full"), h200(1))
    assert (made.layout.strategy, made.layout.reshard_after_forward) == ("single", True)
    assert made.layout.activation_checkpointing in ("except_attention", "full"), "with as many lighter layers as fit"
    assert made.memory.fits
    kept = [c for c in made.candidates if not c.layout.reshard_after_forward]
    assert kept and all(c.reason.code in ("exceeds_memory", "near_limit") for c in kept)


def test_8b_full_does_not_fit_a_smaller_gpu():
    with pytest.raises(UserError) as caught:
        plan(run_config(method__name="full"), h200(1, gpu_bytes=120 * GIB))
    assert "GiB per rank, and there are 116.4 GiB" in caught.value.what
    assert "method.name=lora" in caught.value.fix
    assert "more GPUs" in caught.value.fix
    assert any(line.startswith("optimizer: 59.8 GiB") for line in caught.value.details)


def test_a_message_tells_apart_what_is_needed_and_what_is_there():
    assert compare_gib(25 * GIB, 24 * GIB) == ["25.0 GiB", "24.0 GiB"]
    assert compare_gib(24 * GIB + 2**20, 24 * GIB) == ["24.001 GiB", "24.000 GiB"]


def test_8b_full_is_sharded_over_2_and_8_h200s():
    two = plan(run_config(method__name="full"), h200(2))
    assert two.layout.strategy == "fsdp"
    assert two.memory.fits
    eight = plan(run_config(method__name="full"), h200(8))
    assert (eight.layout.strategy, eight.layout.reshard_after_forward, eight.layout.activation_checkpointing) == (
        "fsdp",
        False,
        "none",
    )
    assert eight.memory.total < two.memory.total
    ddp = [c for c in eight.candidates if c.layout.strategy == "ddp"]
    assert ddp and all(not c.memory.is_safe or c.step_s > eight.step_s for c in ddp)


@pytest.mark.parametrize("keys", [{"method__name": "full"}, {"parallel__offload_activations": True}])
def test_what_is_slower_is_told_by_how_much(keys):
    """Of copies that each rank updates, and of activations that all travel, it said `no faster than the chosen one`."""
    machine = facts(llama_1b(), gpus=2, host_bytes=400 * GIB, data=data_facts(mean=1000, longest=2000))
    made = plan(run_config(**keys), machine)
    slower = [c for c in made.candidates if c.memory.is_safe and c.step_s > 1.01 * made.step_s]
    assert slower and all(f"{c.step_s / made.step_s - 1:.1%} slower" in explain(c.reason) for c in slower)


def test_more_memory_is_not_slower():
    """Unsharded gradients took what 21 lighter layers had filled: 1 % gained for 5."""
    data = data_facts(num_samples=10_000, mean=1000, longest=2000)
    config = run_config(method__name="full", batch__samples=128, batch__micro_tokens=12_288)
    steps = [
        plan(config, facts(llama_8b(), gpus=4, gpu_bytes=gib * GIB, host_bytes=512 * GIB, data=data)).step_s
        for gib in range(68, 80)
    ]
    assert all(more <= 1.002 * less for less, more in itertools.pairwise(steps))


def test_a_small_gpu_recomputes_before_it_gives_up():
    made = plan(run_config(), h200(1, gpu_bytes=24 * GIB))
    assert (made.layout.strategy, made.layout.activation_checkpointing) == ("single", "except_attention")
    kept = [c for c in made.candidates if c.layout.activation_checkpointing == "none"]
    assert kept and all(c.reason.code in ("exceeds_memory", "near_limit") for c in kept)


def test_every_candidate_but_the_chosen_one_has_a_reason():
    made = plan(run_config(), h200(2))
    assert all(bool(c.reason) != c.chosen for c in made.candidates)
    assert {c.layout.strategy for c in made.candidates} == {"ddp", "fsdp"}
    assert chosen(made).memory.terms == made.memory.terms


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({"parallel__strategy": "fsdp"}, {"strategy": "fsdp", "reshard_after_forward": False}),
        (
            {"parallel__strategy": "fsdp", "parallel__reshard_after_forward": True},
            {"strategy": "fsdp", "reshard_after_forward": True},
        ),
        ({"parallel__reshard_after_forward": True}, {"strategy": "fsdp", "reshard_after_forward": True}),
        ({"parallel__activation_checkpointing": "full"}, {"strategy": "ddp", "activation_checkpointing": "full"}),
        ({"parallel__gpus": 1}, {"strategy": "single", "world_size": 1}),
        ({"parallel__gpus": 1, "parallel__strategy": "fsdp"}, {"strategy": "fsdp", "world_size": 1}),
        ({"parallel__compile": False}, {"compile": False}),
        (
            {"parallel__device": "cpu", "model__dtype": "bfloat16", "parallel__gpus": 1, "batch__micro_tokens": 4096},
            {"device": "cpu", "compute_dtype": "bfloat16"},
        ),
        (
            {"model__dtype": "float64"},
            {"compute_dtype": "float64", "master_dtype": "float64", "frozen_dtype": "float64", "attention": "sdpa"},
        ),
        ({"model__dtype": "float32"}, {"compute_dtype": "float32", "master_dtype": "float32", "attention": "sdpa"}),
        ({"batch__micro_tokens": 5000}, {"micro_tokens": 5000}),
        ({"batch__samples": 100}, {"batch_samples": 100}),
        (
            {"data__packing": False, "batch__samples": 32, "batch__micro_samples": 2},
            {"micro_samples": 2, "accumulation": 8, "packing": False, "attention": "sdpa"},
        ),
        ({"optimizer__learning_rate": 1e-5}, {"learning_rate": 1e-5}),
        ({"output__dtype": "bfloat16"}, {"output_dtype": "bfloat16"}),
        ({"evaluate__every_steps": 9, "checkpoint__every_steps": 11}, {"evaluate_every": 9, "checkpoint_every": 11}),
    ],
)
def test_explicit_keys_are_obeyed(keys, fields):
    made = plan(run_config(**keys), facts(gpus=2, data=LONG))
    decided = vars(made.layout) | dict(made) | {"world_size": made.layout.world_size}
    assert {name: decided[name] for name in fields} == fields


def test_an_explicit_strategy_may_fill_the_limit_but_not_pass_it():
    config = run_config(
        method__name="full",
        parallel__strategy="fsdp",
        parallel__activation_checkpointing="full",
        parallel__reshard_after_forward=True,
        parallel__context_degree=1,  # divided packs would need less
        batch__micro_tokens=4096,
    )
    roomy = plan(config, h200(2)).memory
    # Whole gradients wait for the last micro-batch only where they fit; else each is reduced.
    reduced = plan(config, h200(2, gpu_bytes=roomy.total)).memory
    need = reduced.total
    assert roomy.terms["unreduced"] > 0 == reduced.terms["unreduced"] and need < roomy.total
    tight = plan(config, h200(2, gpu_bytes=int(need / 0.97) + 2**20))
    assert tight.memory.fits and not tight.memory.is_safe
    assert any("leaves little headroom" in sentence for sentence in explain_why(tight))
    with pytest.raises(UserError, match="does not fit"):
        plan(config, h200(2, gpu_bytes=int(need / 0.97) - 2**20))


def test_after_running_out_of_memory_micro_batches_are_halved_and_the_global_batch_stays():
    made = first = plan(run_config(batch__samples=64), h200(1))
    sizes = [first.layout.micro_tokens]
    while True:
        try:
            made = plan(
                run_config(batch__samples=64), h200(1), number=made.number + 1, cause="out_of_memory", before=made
            )
        except NothingSmaller as error:
            assert "no smaller plan is left than plan" in error.what and "parallel.offload" in error.fix
            break
        assert (made.batch_samples, made.num_steps, made.learning_rate) == (
            first.batch_samples,
            first.num_steps,
            first.learning_rate,
        )
        assert made.cause == "out_of_memory" and made.ran_out.number == made.number - 1
        sizes.append(made.layout.micro_tokens)
    halved = [size for size in sizes if size > 4096]
    assert all(2 * fewer <= more for more, fewer in itertools.pairwise(halved)) and len(halved) > 1
    assert sizes[-1] == 4096, "the longest row, by the way that needs the least"


def test_what_was_measured_when_memory_ran_out_decides_which_plan_is_the_next():
    """The fastest that fits what was there, by estimates as much too low as the last; once, then by halves."""
    config = run_config(batch__samples=64)
    first = plan(config, h200(1))
    need, limit = first.memory.total, first.memory.limit

    def after(needed: int, available: int, before: Plan = first) -> Plan:
        found = MemoryFound(needed=needed, available=available)
        return plan(config, h200(1), number=before.number + 1, cause="out_of_memory", before=before, found=found)

    low = after(needed=int(1.6 * need), available=limit)  # the estimate was too low
    assert low.memory.total <= limit / 1.6 and low.batch_samples == first.batch_samples
    taken = after(needed=need, available=int(0.6 * need))  # another program holds memory
    assert taken.memory.total <= 0.6 * need
    slight = after(needed=int(1.01 * need), available=limit)
    assert slight.memory.total <= 0.9 * need
    assert slight.step_s <= low.step_s <= taken.step_s
    assert len([c for c in slight.candidates if c.chosen]) == 1
    [said] = [sentence for sentence in explain_why(low) if sentence.startswith("smaller: ")]
    assert f"{format_gib(need)} estimated, {format_gib(limit)} there; now {format_gib(low.memory.total)}" in said
    again = after(needed=low.memory.total, available=limit, before=low)
    assert 2 * again.layout.full_micro_tokens <= low.layout.full_micro_tokens or again.layout.full_micro_tokens == 4096
    resumed = plan(config, h200(1), number=3, cause="resume", before=low)
    assert resumed.layout == low.layout and resumed.ran_out == low.ran_out


def test_a_plan_after_one_that_ran_out_stays_smaller_until_there_is_more_memory():
    first = plan(run_config(batch__samples=64), h200(1))
    second = plan(run_config(batch__samples=64), h200(1), number=2, cause="out_of_memory", before=first)
    third = plan(run_config(batch__samples=64), h200(1), number=3, cause="resume", before=second)
    assert (third.layout.micro_tokens, third.layout.activation_checkpointing, third.ran_out) == (
        second.layout.micro_tokens,
        second.layout.activation_checkpointing,
        second.ran_out,
    )
    assert any(
        sentence.startswith("smaller: ") and "as plan 1 ran out of memory" in sentence
        for sentence in explain_why(third)
    )
    larger = plan(run_config(batch__samples=64), h200(1, gpu_bytes=180 * GIB), number=3, cause="resume", before=second)
    two = plan(run_config(batch__samples=64), h200(2), number=3, cause="resume", before=second)
    assert larger.ran_out is None and two.ran_out is None and larger.layout.micro_tokens > second.layout.micro_tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reshard_after_forward": True}, "weights freed after the forward pass"),
        ({"offload": "optimizer"}, "optimizer states in host memory"),
        ({"lighter_layers": 2}, "lighter in the last 2 layers"),
        ({"keeps_transposed": True}, "frozen experts kept transposed too"),
    ],
)
def test_a_smaller_plan_names_what_differs(changes: dict, words: str):
    layout = {name: getattr(plan(run_config(), h200(1)).layout, name) for name in LAYOUT_FIELDS}
    sentence = explain(reason("smaller", plan=1, now=layout | changes, before=layout))
    now, before = sentence.split(" instead of ")
    assert words in now and words not in before


def test_keys_that_fix_the_micro_batch_are_obeyed_after_running_out_too():
    config = run_config(batch__micro_tokens=8192)
    first = plan(config, h200(1))
    second = plan(config, h200(1), number=2, cause="out_of_memory", before=first)
    assert (
        second.layout.micro_tokens == 8192
        and second.memory.total < first.memory.total
        and second.layout.activation_checkpointing != "none"
    )
    everything = run_config(
        batch__micro_tokens=8192, parallel__activation_checkpointing="full", parallel__offload_activations=False
    )
    with pytest.raises(NothingSmaller, match="no smaller plan") as caught:
        plan(everything, h200(1), number=2, cause="out_of_memory", before=plan(everything, h200(1)))
    assert "leave batch.micro_tokens to auto" in caught.value.fix


def test_nothing_fits_on_cpu():
    with pytest.raises(UserError) as caught:
        plan(
            run_config(parallel__device="cpu", parallel__activation_checkpointing="none"),
            facts(llama_8b(), data=LONG, host_bytes=8 * GIB),
        )
    assert "there are 7.2 GiB" in caught.value.what
    assert "parallel.activation_checkpointing: auto" in caught.value.fix and "use method.name=qlora" in caught.value.fix
    assert "90 % of 8.0 GiB free" in caught.value.why


@pytest.mark.parametrize(("max_length", "advised"), [(513, True), (512, False)])
def test_short_rows_are_not_to_be_shortened(max_length, advised):
    config = run_config(parallel__device="cpu", data__max_length=max_length)
    with pytest.raises(UserError, match="does not fit") as caught:
        plan(config, facts(llama_8b(), data=data_facts(longest=max_length), host_bytes=4 * GIB))
    assert ("shorten the samples" in caught.value.fix) == advised


@pytest.mark.parametrize(("keys", "advised"), [({"batch__micro_tokens": 4096}, True), ({}, False)])
def test_a_micro_batch_given_by_hand_is_to_be_lowered(keys, advised):
    with pytest.raises(UserError, match="does not fit") as caught:
        plan(run_config(parallel__device="cpu", **keys), facts(llama_8b(), data=LONG, host_bytes=4 * GIB))
    assert ("give a smaller micro-batch" in caught.value.fix) == advised


@pytest.mark.parametrize(
    ("keys", "auto"),
    [({"batch__samples": 8}, False), ({"batch__samples": "auto"}, True), ({"batch__loss_tokens": 5000}, False)],
)
def test_a_batch_that_the_plan_chose_is_marked(keys, auto):
    made = plan(
        run_config(**keys), facts(llama_8b(), gpus=1, gpu_bytes=H200_BYTES, data=data_facts(steps_of_epochs=(10,)))
    )
    assert next(sentence for sentence in explain_why(made) if sentence.startswith("batch: ")).endswith("(auto)") == auto


def test_the_batch_in_packs_is_told_in_tokens_and_idle_ranks_are_named():
    made = plan(
        run_config(batch__samples=4), facts(llama_8b(), gpus=8, gpu_bytes=H200_BYTES, data=data_facts(mean=300.0))
    )
    said = next(sentence for sentence in explain_why(made) if sentence.startswith("batch: "))
    assert "4 samples ≈ 1,200 tokens" in said and "(fewer samples than ranks: some are idle)" in said
    as_many = plan(run_config(batch__samples=8), facts(llama_8b(), gpus=8, gpu_bytes=H200_BYTES, data=data_facts()))
    assert not any("some are idle" in sentence for sentence in explain_why(as_many))


def test_what_was_asked_is_told_from_what_was_chosen():
    chosen, asked = (plan(run_config(parallel__strategy=strategy), h200(2)) for strategy in ("auto", "fsdp"))
    said = [
        next(sentence for sentence in explain_why(made) if sentence.startswith("strategy: "))
        for made in (chosen, asked)
    ]
    assert [", as configured" in sentence for sentence in said] == [False, True]


@pytest.mark.parametrize(
    ("keys", "the_facts", "words"),
    [
        ({"parallel__gpus": 4}, facts(gpus=2), "parallel.gpus is 4, but 2 GPUs are visible"),
        ({"parallel__device": "cuda"}, facts(), "no GPU is visible"),
        ({"parallel__strategy": "single"}, facts(gpus=2), "parallel.strategy: single is one process, but there are 2"),
        (
            {"parallel__strategy": "single"},
            facts(world_size=3),
            "parallel.strategy: single is one process, but there are 3",
        ),
        ({"parallel__gpus": 2}, facts(world_size=3), "parallel.gpus is 2, but 3 processes were launched"),
        ({"method__target_modules": ["nose"]}, facts(), "no layer matches method.target_modules: nose"),
    ],
)
def test_contradictions_with_the_facts_name_both(keys, the_facts, words):
    with pytest.raises(UserError) as caught:
        plan(run_config(**keys), the_facts)
    assert words in caught.value.what


def test_bfloat16_where_the_gpu_has_none():
    old = GpuFacts(index=0, name="Tesla V100", memory_bytes=32 * GIB, free_bytes=32 * GIB, compute_capability=(7, 0))
    the_facts = facts().model_copy(update={"host": facts().host.model_copy(update={"gpus": (old,)})})
    assert plan(run_config(), the_facts).layout.compute_dtype == "float32"
    with pytest.raises(UserError, match="Tesla V100 does not have"):
        plan(run_config(model__dtype="bfloat16"), the_facts)


def test_soft_capped_scores_do_not_take_varlen():
    assert plan(run_config(), facts(model_facts(head_dim=8), gpus=1)).attention == "varlen"
    assert plan(run_config(), facts(model_facts(head_dim=8, attention_softcap=50.0), gpus=1)).attention == "blockwise"
    assert plan(run_config(), facts(model_facts(head_dim=264), gpus=1)).attention == "sdpa"


def test_on_cpu():
    made = plan(run_config(), facts())
    assert (
        made.layout.device,
        made.layout.world_size,
        made.layout.strategy,
        made.layout.compute_dtype,
        made.layout.compile,
    ) == (
        "cpu",
        1,
        "single",
        "float32",
        False,
    )
    assert made.environment["OMP_NUM_THREADS"] == "8"
    two = plan(run_config(parallel__gpus=2), facts())
    assert (two.layout.strategy, two.environment["OMP_NUM_THREADS"]) == ("ddp", "4")
    assert two.memory.limit == int(0.9 * 64 * GIB / 2)


def test_foreign_launchers_say_how_many_processes():
    made = plan(run_config(), h200(8, world_size=16))
    assert (made.layout.world_size, made.layout.strategy) == (16, "ddp")


def test_processes_share_the_cores_and_the_memory_of_their_own_machine():
    made = plan(run_config(), facts(world_size=16, local_world_size=2))
    assert made.environment["OMP_NUM_THREADS"] == "4"
    assert made.memory.limit == int(0.9 * 64 * GIB / 2)


def test_the_fullest_gpu_sets_the_limit():
    the_facts = h200(2)
    busy = the_facts.host.gpus[1].model_copy(update={"free_bytes": 60 * GIB})
    the_facts = the_facts.model_copy(
        update={"host": the_facts.host.model_copy(update={"gpus": (the_facts.host.gpus[0], busy)})}
    )
    assert plan(run_config(), the_facts).memory.limit == int(0.97 * 60 * GIB)
    assert plan(run_config(parallel__gpus=1), the_facts).memory.limit == int(0.97 * H200_BYTES)


def test_adapters_on_some_layers_cost_less():
    all_linear = plan(run_config(), facts()).memory.terms
    some = plan(run_config(method__target_modules=["q_proj", "model.layers.0.mlp.up_proj"]), facts()).memory.terms
    assert some["optimizer"] == 8 * 16 * (2 * (8 + 8) + (16 + 8))
    assert some["optimizer"] < all_linear["optimizer"]


def test_the_same_input_gives_the_same_plan_to_the_byte():
    config = run_config(method__name="full")
    made = plan(config, h200(8), number=3, cause="resume")
    assert made.model_dump_json() == plan(config, h200(8), number=3, cause="resume").model_dump_json()
    assert Plan.model_validate_json(made.model_dump_json()) == made
    assert (made.number, made.cause) == (3, "resume")


def test_planning_needs_no_torch():
    """A laptop plans for GPUs that it has not: in a process where torch and transformers cannot be imported."""
    program = (
        "import sys\n"
        "sys.modules.update({'torch': None, 'transformers': None})\n"
        "from manyhands.config.schema import RunConfig\n"
        "from manyhands.facts.types import Facts\n"
        "from manyhands.planner.text import explain_plan\n"
        "from manyhands.planner.search import plan\n"
        "config, facts = RunConfig.model_validate_json(sys.argv[1]), Facts.model_validate_json(sys.argv[2])\n"
        "made = plan(config, facts)\n"
        "explain_plan(made)\n"
        "import manyhands.launch.run.prepare, manyhands.facts.hub, manyhands.facts.host\n"
        "print(made.model_dump_json())\n"
    )
    config, the_facts = run_config(), h200(8)
    arguments = [sys.executable, "-c", program, config.model_dump_json(), the_facts.model_dump_json()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == plan(config, the_facts).model_dump_json()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"optimizer__learning_rate": 1.0}, "optimizer.learning_rate: 1 changes a weight"),
        ({"optimizer__learning_rates": {"lm_head": 3.0}}, "optimizer.learning_rates, lm_head: 3 changes"),
        ({"method__rank": 1024}, "method.rank: 1024 is not below the width of k_proj (1024), v_proj (1024)"),
        (
            {"schedule__warmup_steps": 100, "stop__max_steps": 5},
            "schedule.warmup_steps: 100 is more than the run's 5 steps: the learning rate reaches 5.00% of its peak",
        ),
        ({"schedule__warmup_steps": 5, "stop__max_steps": 5}, ""),
        ({"method__rank": 1023, "optimizer__learning_rate": 0.9}, ""),
        ({"method__rank": 1024, "method__target_modules": ["q_proj"]}, ""),
    ],
)
def test_absurd_values_are_warned_of(keys, said):
    warnings = [
        sentence for sentence in explain_why(plan(run_config(**keys), h200(8))) if sentence.startswith("warning: ")
    ]
    assert len(warnings) == bool(said) and said in "".join(warnings)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_fast_kernels_are_tried_where_asked_and_else_on_gpus(device, method):
    def chosen(**kernels):
        keys = {f"kernels__{key}": value for key, value in kernels.items()}
        return choose_converters(Case(run_config(method__name=method, **keys), device, "varlen"))

    adapters, gpu = method != "full", device == "cuda"
    names = ("fused_modules", "attention_kernels", "fused_loss")
    assert [name in chosen() for name in names] == [adapters and gpu, True, gpu]
    assert ["fused_modules" in chosen(lora=asked) for asked in ("fused", "reference")] == [adapters, False]
    assert ["fused_loss" in chosen(loss=asked) for asked in ("fused", "reference")] == [True, False]
    assert "attention_kernels" not in choose_converters(Case(run_config(method__name=method), device, "sdpa"))
    assert fuses_optimizer(run_config(method__name=method), device) == gpu
    assert not fuses_optimizer(run_config(method__name=method, kernels__optimizer="reference"), device)


def test_converters_are_named_in_the_order_of_their_changes():
    def chosen(**keys):
        case = Case(run_config(**keys), "cuda", "varlen", has_new_tokens=True, continues_adapter=True)
        return choose_converters(case)

    assert chosen(method__name="qlora", method__init="loftq") == (
        *("nf4", "lora", "new_tokens", "adapter", "loftq"),
        *("fused_modules", "attention_kernels", "fused_loss"),
    )
    full = choose_converters(
        Case(run_config(method__name="full", kernels__linear="fp8"), "cpu", "sdpa", has_towers=True)
    )
    assert full == ("parts", "fp8", "fused_modules")


def test_towers_are_left_out_wherever_config_json_has_them_whatever_the_files_hold():
    """Without weights, or with those of the text alone, no tower is counted; the model is built with towers still."""
    made = plan(run_config(), facts(model_facts(is_multimodal=True, num_tower_parameters=0)))
    assert "parts" in made.converters
    assert "parts" not in plan(run_config(), facts()).converters


@pytest.mark.parametrize("keys", [{"checkpoint__keep_best": True}, {"stop__patience": 2}])
def test_keys_that_need_held_out_samples_are_refused_where_a_tenth_is_less_than_one(keys):
    few = facts(llama_8b(), gpus=1, data=data_facts(num_samples=9, num_validation_samples=0))
    plan(run_config(), few)
    with pytest.raises(UserError, match="needs validation samples, and there are none") as refused:
        plan(run_config(**keys), few)
    assert refused.value.where == next(iter(keys)).replace("__", ".") and "a tenth" in refused.value.why


def test_default_targets_are_named_in_the_plan_and_refused_where_peft_has_none():
    config = run_config(method__target_modules="peft-default")
    made = plan(config, facts())
    assert made.target_modules == ("q_proj", "v_proj")
    assert any("target modules: q_proj, v_proj, which PEFT adapts" in sentence for sentence in map(explain, made.why))
    assert plan(run_config(), facts()).target_modules is None
    phi = model_facts().model_copy(update={"model_type": "phi3"})
    with pytest.raises(UserError, match="peft-default has no layers for phi3") as refused:
        plan(config, facts(phi))
    assert "self_attn.q_proj" in refused.value.details and "all-linear" in refused.value.fix


def test_a_start_takes_fewer_gpus_than_asked_for_where_that_is_allowed():
    config = run_config(parallel__gpus=8, launch__min_gpus=3)
    made = plan(config, facts(gpus=3))
    assert made.layout.world_size == 3
    assert "processes: 3, of 8 asked for: launch.min_gpus allows as few" in explain_why(made)
    assert plan(config, facts(world_size=4)).layout.world_size == 4, "as another launcher has started them"
    for fewer in (facts(gpus=2), facts(world_size=2)):
        with pytest.raises(UserError, match=r"parallel\.gpus is 8"):
            plan(config, fewer)
    with pytest.raises(UserError) as refused:
        plan(run_config(parallel__gpus=8), facts(gpus=3))
    assert "launch.min_gpus=3 to train on fewer" in refused.value.fix


def test_a_gpu_that_does_not_answer_is_an_error_unless_fewer_are_allowed():
    lost = "GPU 1 does not answer (NVML: GPU is lost)"
    found = facts(gpus=3)
    broken = found.model_copy(update={"host": found.host.model_copy(update={"lost_gpus": (lost,)})})
    with pytest.raises(UserError, match="GPU 1 does not answer") as refused:
        plan(run_config(), broken)
    assert "launch.min_gpus=3" in refused.value.fix
    assert plan(run_config(launch__min_gpus=3), broken).layout.world_size == 3
    assert plan(run_config(parallel__gpus=2), broken).layout.world_size == 2, "it is not needed"
    assert plan(run_config(parallel__device="cpu"), broken).layout.world_size == 1
