"""The prompt of a pair computed once for both answers, against a copy for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.config.schema import PreferenceSection
from manyhands.config.tasks import TASKS
from manyhands.convert.lora import adapted_layers, without_adapters
from manyhands.core.errors import UserError
from manyhands.data.batch import collate as collate_module
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape, list_keys
from manyhands.data.store.streams import (
    DOCUMENTS,
    MASK,
    SHARED,
    TOKENS,
    Sample,
    join_documents,
    make_sample,
    share_prompt,
)
from manyhands.facts.types import SharedLengths
from manyhands.model import attention
from manyhands.model.attention import document_mask
from manyhands.model.checks import check_prompts
from manyhands.model.loss import LossModel
from manyhands.model.structure import set_attention
from manyhands.planner.prompts import choose_prompts
from manyhands.planner.search import plan
from manyhands.planner.text import sentence_of
from tests.keys.lab import Lab, open_lab
from tests.planner.examples import data_facts, facts, model_facts, run_config
from tests.training.preference_ranks import make_model

SIZES = ((1, 3, 2), (33, 9, 17), (2, 1, 1), (12, 30, 4), (7, 5, 5))  # tokens of prompt, chosen, rejected
LOSSES: tuple[dict[str, Any], ...] = ({"loss": "sigmoid"}, {"loss": "orpo"}, {"loss": "simpo", "sft_weight": 0.5})
SHAPES = (
    {},
    {"tile": 64},  # padding is one more document
    {"tile": 64, "longest": 80, "documents": 10},  # bounds are repeated
)


class Prompted:
    """Pairs of answers to prompts of ``SIZES``; some of their tokens are not trained."""

    streams = (TOKENS, MASK, DOCUMENTS, SHARED)

    def sample(self, index: int) -> Sample:
        draw, (prompt, *answers) = np.random.default_rng(index), SIZES[index]
        common, documents = draw.integers(0, 256, prompt), []
        for length in answers:
            mask = np.concatenate([np.zeros(prompt, dtype=bool), draw.random(length) < 0.7])
            mask[prompt] = True
            ids = np.concatenate([common, draw.integers(0, 256, length)]).astype(np.int32)
            documents.append(make_sample(ids, mask))
        return {**join_documents(documents), **share_prompt(documents)}


def compute(keys: dict[str, Any], method: str, cuts: Sequence[Sequence[int]], implementation: str, **shape: Any) -> Any:
    """(loss, gradient, tokens) of all pairs in micro-batches of ``cuts``."""
    model = make_model(method=method)
    attention.register_attention()
    set_attention(model, implementation)
    terms = TASKS["preference"].make_terms(SimpleNamespace(preference=PreferenceSection(**keys)))
    loss_model, layers = LossModel(model, fuse=True, terms=terms), tuple(adapted_layers(model).values())
    loss_model.without_adapters = lambda: without_adapters(layers)
    totals = {term.name: float(term.weigh(Prompted(), np.arange(len(SIZES))).sum()) for term in terms}
    loss, tokens = 0.0, 0
    for numbers in cuts:
        batch = collate(Prompted(), np.array(numbers), BatchShape(True, **shape))
        found = loss_model(batch, metrics=True)
        share = sum(term.coefficient * found[term.name][0].double() / totals[term.name] for term in terms)
        share.backward()
        loss, tokens = loss + float(share.detach()), tokens + batch["input_ids"].numel()
    return loss, torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad]), tokens


def attend_in_a_loop(query, key, value, bounds, key_bounds, *_, scale, window_size, **extra):  # type: ignore[no-untyped-def]
    """torch's varlen: the last query of a document sees its last key."""
    assert window_size == (-1, 0) and int(key_bounds[-1]) == len(key)
    out = []
    for begin, end, first, last in zip(bounds[:-1], bounds[1:], key_bounds[:-1], key_bounds[1:], strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[begin:end], key[first:last], value[first:last]))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        attend = torch.nn.functional.scaled_dot_product_attention
        out.append(attend(q[None], k[None], v[None], mask, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.ci
@pytest.mark.parametrize("implementation", ["sdpa", attention.VARLEN])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_loss_and_gradients_are_those_of_two_copies(
    monkeypatch: pytest.MonkeyPatch, method: str, implementation: str
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", attend_in_a_loop)
    monkeypatch.setattr(attention, "TAKES_GROUPS", True)
    for keys in LOSSES[method == "full" :]:
        loss, gradient, tokens = compute(keys, method, [range(5)], "sdpa")
        for cuts in ([range(5)], [[3, 0], [1], [4, 2]]):
            for shape in SHAPES:
                arguments = (keys, method, cuts, implementation)
                found = compute(*arguments, shares_prompts=True, **shape)
                assert found[0] == pytest.approx(loss, rel=1e-6)
                assert (found[1] - gradient).norm() <= 1e-6 * gradient.norm()
                assert shape or found[2] == tokens - sum(prompt - 1 for prompt, *_ in SIZES)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("prompts")) as lab:
        yield lab


def keys_of_pairs(lab: Lab, **keys: Any) -> dict[str, Any]:
    rows = [
        {"prompt": "alpha " * (1 + n % 7), "chosen": "beta " * (1 + n % 3), "rejected": f"gamma {n}"} for n in range(60)
    ]
    path = lab.write_rows("pairs.jsonl", rows)
    return {"task": "preference", "data.train": path, "stop.max_steps": 4, "optimizer.learning_rate": 0.02, **keys}


@pytest.mark.ci
def test_a_whole_run_takes_the_steps_of_two_copies(lab: Lab) -> None:
    """With the reference of adapters switched off and stored, and where processes collate."""
    copied = lab.run(keys_of_pairs(lab, **{"preference.share_prompts": False}))
    assert not copied.rank.plan.shares_prompts
    for more in ({}, {"preference.reference": "stored", "data.workers": 1}):
        shared = lab.run(keys_of_pairs(lab, **more))
        assert shared.rank.plan.shares_prompts
        assert shared.losses == pytest.approx(copied.losses, rel=1e-5) and shared.losses[-1] < shared.losses[0]
        for name in ("reward_margin", "loss"):
            found, expected = (each.column(name, "evaluation") for each in (shared, copied))
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert shared.rank.plan.data.tokens < copied.rank.plan.data.tokens


def test_answers_that_see_each_other_are_refused_before_the_first_step(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a mask of all before, by one without the prompt, and by a list of keys that goes on behind it."""

    def leak(bounds: np.ndarray, shared: Sequence[int], prompts: Sequence[int]) -> dict[str, Any]:
        return list_keys(bounds, [count + 9 * (count > 0) for count in shared], prompts)

    loss_model = LossModel(make_model(method="full"))
    check_prompts(loss_model, loss_model, torch.device("cpu"))
    with monkeypatch.context() as patch:
        causal = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
        patch.setattr(attention, "mask_of_keys", lambda batch: causal)
        with pytest.raises(UserError, match="answers to one prompt see each other"):
            check_prompts(loss_model, loss_model, torch.device("cpu"))
        patch.setattr(attention, "mask_of_keys", lambda batch: document_mask(batch["position_ids"]))  # no prompt
        with pytest.raises(UserError, match="logits of answers that share a prompt differ"):
            check_prompts(loss_model, loss_model, torch.device("cpu"))
    monkeypatch.setattr(collate_module, "list_keys", leak)
    with pytest.raises(UserError, match="answers to one prompt see each other"):
        lab.check(lab.start(keys_of_pairs(lab, seed=3)))


def test_the_plan_counts_each_prompt_once_or_says_why_not() -> None:
    shared = SharedLengths(
        num_tokens=200_000, max_length=1500, mean_length=200.0, num_validation_tokens=4000, first_lengths=(200, 190)
    )
    data = data_facts(num_documents=2, shared=shared, first_lengths=(300, 290))
    for model, keys, why in (
        ({}, {}, "computed once for both answers: 200,000 tokens an epoch in place of 300,000"),
        ({}, {"preference__share_prompts": True}, "once for both answers, as configured"),
        ({}, {"preference__share_prompts": False}, "computed for each answer of a pair, as configured"),
        ({"sliding_window": 16}, {}, "as layers have a sliding window"),
        ({"num_mixer_layers": 1}, {}, "as layers carry a state along a row"),
        ({"attention_sinks": True}, {}, "as heads have attention sinks"),
        ({"attention_softcap": 30.0}, {}, "as attention is computed blockwise"),
        ({"rotates_by_length": True}, {}, "as rotary frequencies depend on the length of each answer"),
        ({"is_multimodal": True}, {}, "as the model has parts for images"),
        ({}, {"method__neftune_alpha": 5.0}, "as noise on embeddings depends on the length of each answer"),
        ({}, {"moe__balance": 0.1}, "as the balance loss is one of each answer with its prompt"),
    ):
        config, known = run_config(task="preference", **keys), facts(model_facts().model_copy(update=model), data=data)
        kind = "blockwise" if "attention_softcap" in model else "sdpa"
        found, shares, (reason,) = choose_prompts(config, known, kind)
        assert why in sentence_of(reason) and shares == ("once" in why)
        assert found.data.num_tokens == (200_000 if shares else 300_000)
        if "as configured" not in why and not shares:
            asked = config.model_copy(update={"preference": PreferenceSection(share_prompts=True)})
            with pytest.raises(UserError, match="cannot be computed once"):
                choose_prompts(asked, known, kind)
    for num_tokens, asked, shares in ((262_000, "auto", True), (263_000, "auto", False), (263_000, True, True)):
        few = data.model_copy(update={"shared": shared.model_copy(update={"num_tokens": num_tokens})})
        config, known = run_config(task="preference", preference__share_prompts=asked), facts(model_facts(), data=few)
        _, found, (reason,) = choose_prompts(config, known, "varlen")
        assert found is shares and ("save less than an eighth of the tokens" in sentence_of(reason)) is not shares
    big = model_facts(4096, 16384, 32, 32, 8, 32_000)
    one, other = (
        plan(run_config(task="preference", preference__share_prompts=shares), facts(big, data=data, gpus=1))
        for shares in (True, False)
    )
    assert one.shares_prompts and not other.shares_prompts and one.batch_samples == other.batch_samples
    assert one.step_s < other.step_s
