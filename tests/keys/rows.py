"""Effects of ``task``, ``data.*`` and ``batch.*``: which rows, which tokens of them, how many in a step."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.core.errors import UserError
from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.summary import PreparedData
from tests.keys.lab import NUM_STEPS, Lab, make_rows

LONG = {"prompt": "alpha", "completion": "beta " * 80}  # 400 tokens and more


def facts_of(lab: Lab, **keys: object) -> PreparedData:
    from manyhands.data.tokenize.prepare import prepare

    return prepare(
        lab.config({key.replace("__", "."): value for key, value in keys.items()}), lab.folder / "model", lambda _: None
    )


def task(lab: Lab) -> None:
    path = lab.write_rows("both.jsonl", [row | {"text": row["prompt"]} for row in make_rows(60)])
    answers = facts_of(lab, data__train=path, data__format="prompt")
    text = facts_of(lab, data__train=path, data__format="text", task="cpt")
    assert answers.num_loss_tokens < answers.num_tokens - answers.num_samples
    assert text.num_loss_tokens == text.num_tokens - text.num_samples  # every token but the first
    prose = lab.write_rows("prose.jsonl", [{"text": row["prompt"]} for row in make_rows(60)])
    only_chat = facts_of(lab, data__train=path, data__format="prompt", data__validation_fraction=0.0)
    both = facts_of(
        lab, data__train=[{"path": path, "format": "prompt"}, prose], task="mixed", data__validation_fraction=0.0
    )
    assert (
        both.num_samples == 120
        and both.num_loss_tokens - only_chat.num_loss_tokens == both.num_tokens - only_chat.num_tokens - 60
    )


def train(lab: Lab) -> None:
    path = lab.write_rows("others.jsonl", make_rows(36, seed=1))
    assert facts_of(lab, data__train=path).num_samples == 24
    assert lab.run({"data.train": path}).losses[0] != lab.base.losses[0]
    more = lab.write_rows(
        "more.jsonl", [{"question": "alpha", "answer": row["completion"]} for row in make_rows(30, seed=3)]
    )
    sources = [
        {"path": path, "weight": 0.5},
        {"path": more, "name": "extra", "max_samples": 20, "format": "question", "weight": 2},
    ]
    ran = lab.run({"data.train": sources, "data.validation_fraction": 0.0})
    store, order = ran.rank.store, ran.rank.order
    assert np.bincount(store.train.sources).tolist() == [36, 20] and store.meta["sources"][1]["name"] == "extra"
    epoch = np.concatenate([order.samples(0, index) for index in range(order.steps_per_epoch(0))])
    assert np.bincount(store.train.sources[epoch]).tolist() == [18, 40]  # half of one, all of the other twice
    assert ran.column("num_samples") == [8] * 7 + [2]
    sliced = [{"path": path, "split": "train[:25%]"}]  # in place of max_samples, which the seed draws
    assert facts_of(lab, data__train=sliced, data__validation_fraction=0.0).num_samples == 9
    renamed = lab.write_rows("columns.jsonl", [{"a": row["prompt"], "b": row["completion"]} for row in make_rows(60)])
    talks = [
        {"messages": [{"role": "visitor", "content": row["prompt"]}, {"role": "clerk", "content": row["completion"]}]}
        for row in make_rows(60)
    ]
    own_roles = {"path": lab.write_rows("roles.jsonl", talks), "roles": {"visitor": "user", "clerk": "assistant"}}
    assert facts_of(lab, data__train=[own_roles]).num_loss_tokens == facts_of(lab).num_loss_tokens
    own_roles["roles"] = {"visitor": "assistant", "clerk": "user"}
    assert facts_of(lab, data__train=[own_roles]).num_loss_tokens != facts_of(lab).num_loss_tokens
    own_fields = [{"path": renamed, "fields": {"prompt": "a", "completion": "b"}}]
    assert facts_of(lab, data__train=own_fields).num_tokens == facts_of(lab).num_tokens


def validation(lab: Lab) -> None:
    path = lab.write_rows("validation.jsonl", make_rows(7, seed=2))
    ran = lab.run({"data.validation": path, "data.validation_fraction": 0.0})
    assert ran.column("num_samples", "evaluation") == [7, 7]
    assert ran.rank.store.train.num_samples == 60  # nothing is held out
    several = facts_of(lab, data__validation=[path, {"path": path, "max_samples": 3}], data__validation_fraction=0.0)
    assert several.num_validation_samples == 10


def validation_fraction(lab: Lab) -> None:
    held_out = facts_of(lab, data__validation_fraction=0.5)
    assert (held_out.num_samples, held_out.num_validation_samples) == (30, 30)
    assert facts_of(lab, data__validation_fraction=7).num_validation_samples == 7
    assert lab.run({"data.validation_fraction": 0.0}).rows("evaluation") == []


def row_format(lab: Lab) -> None:
    rows = [{"prompt": "alpha", "completion": "a", "question": "beta", "answer": "b"}] * 40
    path = lab.write_rows("ambiguous.jsonl", rows)
    for name, word in (("prompt", "alpha"), ("question", "beta")):
        keys = {"data.train": path, "data.validation_fraction": 0.0, "data.format": name, "stop.max_steps": 1}
        assert f"user\n{word}" in lab.run(keys).prompt_of(0)
    ready_rows(lab)


def ready_rows(lab: Lab) -> None:
    parts = [{"text": "alpha beta", "label": False}, {"text": " gamma", "label": True}]
    path = lab.write_rows("segments.jsonl", [{"segments": parts}] * 4)
    ran = lab.run({"data.train": path, "data.validation_fraction": 0.0, "data.format": "segments", "stop.max_steps": 1})
    assert ran.prompt_of(0) == "alpha beta gamma" and ran.column("num_loss_tokens") == [4 * len(" gamma")]


def fields(lab: Lab) -> None:
    renamed = [{"frage": row["prompt"], "antwort": row["completion"], "prompt": "x"} for row in make_rows(60)]
    path = lab.write_rows("renamed.jsonl", renamed)
    same = facts_of(lab, data__train=path, data__fields={"prompt": "frage", "completion": "antwort"})
    assert same.num_tokens == facts_of(lab).num_tokens
    with pytest.raises(UserError, match="format of the rows is not known"):
        facts_of(lab, data__train=path)


def ignore(lab: Lab) -> None:
    path = lab.write_rows("labelled.jsonl", [row | {"label": n % 2} for n, row in enumerate(make_rows(60))])
    assert facts_of(lab, data__train=path, data__ignore=["label"]).num_tokens == facts_of(lab).num_tokens
    with pytest.raises(UserError, match="this is preference data"):
        facts_of(lab, data__train=path)


def max_samples(lab: Lab) -> None:
    facts = facts_of(lab, data__max_samples=16)
    assert (facts.num_samples, facts.num_dropped) == (16, 24)
    assert len(lab.run({"data.max_samples": 16}).losses) == 2


def max_length(lab: Lab) -> None:
    path = lab.write_rows("long.jsonl", [*make_rows(40), LONG])
    assert facts_of(lab, data__train=path, data__max_length=512).max_length > 400
    with pytest.raises(UserError, match=r"longer than data.max_length") as caught:
        facts_of(lab, data__train=path, data__max_length=200)
    assert "long.jsonl:41" in caught.value.details[0]


def too_long(lab: Lab) -> None:
    path = lab.write_rows("long.jsonl", [*make_rows(40), LONG])
    cut = facts_of(lab, data__train=path, data__max_length=200, data__too_long="truncate")
    assert (cut.num_truncated, cut.max_length, cut.num_samples + cut.num_validation_samples) == (1, 200, 41)
    dropped = facts_of(lab, data__train=path, data__max_length=200, data__too_long="drop")
    assert (dropped.num_truncated, dropped.num_samples + dropped.num_validation_samples) == (0, 40)
    assert dropped.left_out == {"data.too_long": {"long": 1}}
    text = lab.write_rows("text.jsonl", [{"text": "alpha " * 100}] * 4)
    divided = facts_of(
        lab, task="cpt", data__train=text, data__max_length=200, data__too_long="split", data__validation_fraction=0.0
    )
    assert divided.num_split == 4 and divided.num_samples > 4 and divided.max_length == 200


def min_length(lab: Lab) -> None:
    kept = facts_of(lab, data__min_length=60, data__validation_fraction=0.0)
    lengths = TokenStore.open(kept.folder).train.lengths
    assert (
        lengths.min() >= 60 and kept.left_out == {"data.min_length": {"rows": 60 - len(lengths)}} and len(lengths) < 60
    )


def deduplicate(lab: Lab) -> None:
    path = lab.write_rows("twice.jsonl", make_rows(30) * 2)
    different = len({tuple(row.values()) for row in make_rows(30)})
    facts = facts_of(lab, data__train=path, data__deduplicate=True, data__validation_fraction=0.0)
    assert facts.num_samples == different and facts.left_out == {"data.deduplicate": {"twice": 60 - different}}


def order(lab: Lab) -> None:
    ran = lab.run({"data.order": "as_given", "stop.epochs": 2})
    order, shuffled = ran.rank.order, lab.base.rank.order
    assert [order.samples(epoch, 0).tolist() for epoch in range(2)] == [list(range(8))] * 2
    assert shuffled.samples(0, 0).tolist() != list(range(8))
    assert ran.losses[0] != lab.base.losses[0]


def packing(lab: Lab) -> None:
    assert (
        lab.base.rank.config.data.packing == "auto"
    )  # what the plan makes of a model that leaks: tests/planner/test_packing.py
    packed, padded = lab.base, lab.run({"data.packing": False})
    assert packed.batch()["input_ids"].shape[0] == 1 and "cu_seq_lens" in packed.batch()
    assert padded.batch()["input_ids"].shape[0] > 1 and "cu_seq_lens" not in padded.batch()
    assert padded.losses == pytest.approx(packed.losses, rel=1e-4)


def cache(lab: Lab) -> None:
    elsewhere = lab.new_path("cache")
    facts = facts_of(lab, data__cache=str(elsewhere))
    assert [path.name for path in elsewhere.glob("*")] == [facts.digest]
    assert TokenStore.open(elsewhere / facts.digest).train.num_samples == 40


def batch_samples(lab: Lab) -> None:
    ran = lab.run({"batch.samples": 16})
    assert ran.column("num_samples") == [16, 16, 8] and lab.base.column("num_samples") == [8] * NUM_STEPS


def batch_loss_tokens(lab: Lab) -> None:
    counts = lab.run({"batch.samples": "auto", "batch.loss_tokens": 150}).column("num_loss_tokens")
    longest = int(lab.base.rank.store.train.num_loss_tokens.max())
    assert all(150 <= count < 150 + longest for count in counts[:-1])
    assert sum(counts) == sum(lab.base.column("num_loss_tokens"))


def batch_packs(lab: Lab) -> None:
    """A step trains what two packs of 256 tokens hold, packed or not, in whatever micro-batches."""
    keys = {"batch.samples": "auto", "batch.packs": 2}
    ran = lab.run(keys)
    lengths = lab.base.rank.store.train.lengths
    tokens = ran.column("num_tokens")
    assert sum(tokens) == lengths.sum() and len(tokens) == -(-lengths.sum() // 512)
    assert all(512 - 2 * lengths.min() < count <= 512 for count in tokens[:-1])
    for how in ({"batch.micro_tokens": 256}, {"data.packing": False, "batch.micro_samples": 3}):
        other = lab.run(keys | how)
        assert other.column("num_samples") == ran.column("num_samples")
        assert other.column("num_micro_batches") != ran.column("num_micro_batches")
        assert other.losses == pytest.approx(ran.losses, rel=1e-4)


def micro_tokens(lab: Lab) -> None:
    ran = lab.run({"batch.micro_tokens": 256})
    assert ran.batch()["input_ids"].shape[1] <= 256 < lab.base.batch()["input_ids"].shape[1]
    assert ran.column("num_micro_batches")[0] > lab.base.column("num_micro_batches")[0]
    assert ran.losses == pytest.approx(lab.base.losses, rel=1e-4)  # how it is carried out, not what it is


def seed(lab: Lab) -> None:
    other, base = lab.run({"seed": 1}), lab.base
    assert not np.array_equal(other.rank.order.samples(0, 0), base.rank.order.samples(0, 0))
    assert {other.prompt_of(i) for i in range(40)} != {base.prompt_of(i) for i in range(40)}  # other rows are held out
    first, second = (
        lab.start({"seed": n}).model.get_parameter("model.layers.0.mlp.up_proj.lora_A.weight") for n in (0, 1)
    )
    assert not first.equal(second)
    # Dropout: the same rows and adapters, another seed from the first step on.
    losses = []
    for n in (0, 1):
        rank = lab.start({"method.dropout": 0.5, "stop.max_steps": 3})
        rank.config = rank.config.model_copy(update={"seed": n})
        losses.append(lab.train(rank).losses)
    assert losses[0] != losses[1]
