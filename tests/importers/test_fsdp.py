"""FSDP's options have one meaning, however a tool spells them."""

from __future__ import annotations

import pytest

from manyhands.config.read import ParsedFile
from manyhands.importers.fsdp import ALREADY, OPTIONS, fsdp_keys, fsdp_options, map_fsdp
from manyhands.importers.translation import ImportContext, Translation, Translator


def translate(options: dict[str, object], version: int = 1) -> Translation:
    t = Translator(
        ParsedFile({"fsdp": options} if options else {}, "theirs"), ImportContext(), tool="Toy", known=fsdp_keys("fsdp")
    )
    map_fsdp(t, fsdp_options(t, "fsdp"), version=version)
    return t.finish()


FSDP = {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("options", "parallel"),
    [
        ({}, FSDP),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, FSDP),
        ({"sharding_strategy": 1}, FSDP),
        ({"sharding_strategy": "shard_grad_op"}, FSDP | {"reshard_after_forward": False}),
        ({"sharding_strategy": "NO_SHARD"}, {"strategy": "ddp"}),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"strategy": "hsdp"}),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, {"strategy": "hsdp", "reshard_after_forward": False}),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, FSDP | {"reshard_after_forward": False}),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": "false"}, FSDP),  # version 1 does not read it
        ({"version": 2, "reshard_after_forward": True}, FSDP | {"reshard_after_forward": True}),
        ({"version": "2", "sharding_strategy": "1", "reshard_after_forward": "false"},
         FSDP | {"reshard_after_forward": False}),
        ({"offload_params": True}, FSDP | {"offload": "all"}),
        ({"offload_params": "false", "activation_checkpointing": False}, FSDP),
        ({"fsdp_activation_checkpointing": True}, FSDP | {"activation_checkpointing": "full"}),
        ({"mixed_precision_policy": "none"}, FSDP),
        ({"activation_checkpointing_offload": True}, FSDP | {"offload_activations": True}),
    ],
)  # fmt: skip
def test_an_option_s_meaning(options: dict[str, object], parallel: dict[str, object]) -> None:
    done = translate(options)
    assert done.findings() == [] and done.mapping == {"parallel": parallel}


def test_what_is_so_by_construction_changes_nothing() -> None:
    done = translate({name: "x" for name in ALREADY if name != "version"})
    assert {outcome.kind for outcome in done.outcomes} == {"no_op"} and done.mapping == {"parallel": FSDP}


def test_every_option_has_an_outcome() -> None:
    assert len(translate(dict.fromkeys(OPTIONS, "1")).outcomes) == len(OPTIONS)


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({"sharding_strategy": "FULLSHARD"}, "`fsdp.sharding_strategy`: got FULLSHARD, allowed: FULL_SHARD, SHARD_"),
        ({"version": 2, "reshard_after_forward": "FULL_SHARD"}, "write true or false (FSDP 2)"),
        ({"offload_params": "maybe"}, "`fsdp.offload_params`: got maybe, allowed: true or false"),
        ({"ignored_modules": "lm_head"}, "`fsdp.ignored_modules`: `lm_head`: every module is sharded"),
        ({"ofload_params": True}, "`fsdp.ofload_params`: Toy has no such key: did you mean `fsdp.offload_params`?"),
        ({"fsdp_offload_params": True, "offload_params": False}, "says otherwise: keep one"),
    ],
)
def test_what_is_refused(options: dict[str, object], finding: str) -> None:
    assert finding in " ".join(translate(options).findings())


def test_float16_is_substituted() -> None:
    done = translate({"mixed_precision_policy": "fp16"})
    assert [outcome.kind for outcome in done.outcomes] == ["substituted"] and done.mapping["model"] == {
        "dtype": "bfloat16"
    }
