"""The chunked loss against three obvious lines, and documents side by side against documents alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.model import loss as loss_module
from manyhands.model.checks import (
    check_batches,
    check_loss,
    check_packing,
    check_padding,
    foreign_errors,
    pack_documents,
)
from manyhands.model.loss import IGNORED, LossModel, chunk_rows
from manyhands.model.probe import probe
from tests.support.tiny import FAMILIES, tiny_config, tiny_model

CPU = torch.device("cpu")


def make_batch(seed: int = 0, num_samples: int = 2, length: int = 33, trained: float = 0.6) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (num_samples, length), generator=draw)
    labels = ids.roll(-1, dims=1)
    labels[torch.rand(labels.shape, generator=draw) >= trained] = IGNORED
    return {"input_ids": ids, "labels": labels}


def reference(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"], use_cache=False).logits.double()
    log_p = logits.log_softmax(-1)
    return -sum(
        log_p[b, t, y] for b, row in enumerate(batch["labels"]) for t, y in enumerate(row.tolist()) if y != IGNORED
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "chunk_rows", lambda _: 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_three_lines_in_float64(small_chunks: None, family: str) -> None:
    caps = {"final_logit_softcapping": 5.0} if family == "gemma3" else {}
    model = tiny_model(family, "float64", **caps)
    batch = make_batch()
    expected = reference(model, batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss_sum, num_loss_tokens = LossModel(model)(batch)["lm"]
    loss_sum.backward()
    assert loss_sum.dtype == torch.float64 and num_loss_tokens == (batch["labels"] != IGNORED).sum()
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-11, msg=name)


def test_sums_are_float32_and_rows_given_ahead_change_nothing() -> None:
    model = LossModel(tiny_model("llama"))
    batch = make_batch()
    loss_sum, _ = model(batch)["lm"]
    rows = (batch["labels"].flatten() != IGNORED).nonzero().squeeze(1)
    assert loss_sum.dtype == torch.float32
    assert torch.equal(loss_sum, model(batch | {"label_positions": rows})["lm"][0])
    half = LossModel(tiny_model("llama", "bfloat16"))(batch)["lm"][0]
    assert half.dtype == torch.float32 and half.item() == pytest.approx(loss_sum.item(), rel=5e-2)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_without_targets_gives_a_zero_that_reaches_every_parameter(weighted: bool) -> None:
    model, batch = LossModel(tiny_model("qwen3")), make_batch(trained=0.0)
    terms = model(weigh(batch) if weighted else batch, metrics=True)
    loss_sum, num_loss_tokens = terms["lm"]
    loss_sum.backward()
    assert loss_sum.item() == 0 and num_loss_tokens.item() == 0 and terms["correct"][0].item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_correct_counts_the_arg_max(small_chunks: None) -> None:
    inner = tiny_model("llama")
    batch = make_batch()
    with torch.no_grad():
        guess = inner(batch["input_ids"], use_cache=False).logits.argmax(-1)
        batch["labels"][0] = guess[0]  # every target of the first row is right
        hits = ((guess == batch["labels"]) & (batch["labels"] != IGNORED)).sum()
        num_correct, num_loss_tokens = LossModel(inner)(batch, metrics=True)["correct"]
    assert num_correct == hits >= 33 and num_loss_tokens == (batch["labels"] != IGNORED).sum()


def test_chunks_hold_half_a_gigabyte_of_logits_but_never_starve_the_head() -> None:
    assert chunk_rows(128256) == 1046 and chunk_rows(10**6) == 256
    assert chunk_rows(128256) * 128256 * 4 <= 2**29


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_as_if_alone(family: str) -> None:
    model = tiny_model(family, "float64").eval()
    documents = [torch.randint(0, 256, (1, n), generator=torch.Generator().manual_seed(n)) for n in (3, 30, 1, 17)]
    packed = LossModel(model).logits(pack_documents(documents))
    alone = torch.cat([model(document, use_cache=False).logits for document in documents], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_right_padding_changes_nothing(family: str) -> None:
    model = LossModel(tiny_model(family, "float64"))
    short = make_batch(1, num_samples=1, length=9)
    padded = {"input_ids": torch.zeros(1, 20, dtype=torch.int64), "labels": torch.full((1, 20), IGNORED)}
    for name in padded:
        padded[name][:, :9] = short[name]
    assert model(padded)["lm"][0].item() == pytest.approx(model(short)["lm"][0].item(), rel=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_checks_pass_on_a_sound_model_and_leave_it_in_training_mode(dtype: str) -> None:
    model = LossModel(tiny_model("gemma3", dtype, final_logit_softcapping=20.0)).train()
    assert check_loss(model, model, CPU) < 1e-2
    assert check_packing(model, model, CPU) < 5e-2
    assert model.training and model.model.training


def test_weights_that_are_no_numbers_are_named() -> None:
    model = LossModel(tiny_model("llama"))
    with torch.no_grad():
        model.model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = float("nan")
    with pytest.raises(UserError, match="weights give no numbers") as refused:
        check_loss(model, model, CPU)
    assert refused.value.details == ("model.layers.1.mlp.up_proj.weight",) and "family" not in str(refused.value)


@pytest.mark.parametrize("implementation", ["sdpa", "blockwise"])
def test_an_encoder_is_named_as_one(implementation: str) -> None:
    """With sdpa its tokens see those behind them; our attention hides them, and differs from the model's own code."""
    from transformers import BertConfig, BertLMHeadModel

    from manyhands.model.attention import BLOCKWISE, register_attention

    register_attention()
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 97,
    }
    config = BertConfig(
        **sizes, initializer_range=0.3, attn_implementation="sdpa" if implementation == "sdpa" else BLOCKWISE
    )
    model = LossModel(BertLMHeadModel(config).train())
    with pytest.raises(UserError, match="BertLMHeadModel is an encoder"):
        check_loss(model, model, CPU)
        check_padding(model, model, CPU)


def test_a_leak_between_documents_is_refused() -> None:
    model = LossModel(tiny_model("llama"))
    leaky = SimpleNamespace(logits=lambda batch: model.logits({"input_ids": batch["input_ids"]}))  # documents as one
    with pytest.raises(UserError, match="see each other"):
        check_packing(leaky, model, CPU)


def test_positions_that_run_on_are_refused() -> None:
    model = LossModel(tiny_model("llama", rope_theta=10.0))
    other = LossModel(tiny_model("llama", rope_theta=100.0))
    # no document sees another, but each is rotated by where it lies: here by another base
    shifted = SimpleNamespace(
        logits=lambda batch: (other if len(batch.get("cu_seq_lens", ())) > 2 else model).logits(batch)
    )
    with pytest.raises(UserError, match="differ from those alone"):
        check_packing(shifted, model, CPU)


def test_a_head_that_is_not_the_models_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LossModel(tiny_model("gemma3", final_logit_softcapping=2.0))
    monkeypatch.setattr(LossModel, "logits_of", lambda self, hidden: self.model.lm_head(hidden))  # forgets the cap
    with pytest.raises(UserError, match="does not follow"):
        check_loss(model, model, CPU)


def test_a_head_may_read_attributes_of_its_base() -> None:
    """Falcon-H1 multiplies its logits by a number that the base holds."""
    from transformers import AutoModelForCausalLM, FalconH1Config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 97}
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = FalconH1Config(**sizes, **mamba, **heads, lm_head_multiplier=0.5)
    model = LossModel(AutoModelForCausalLM.from_config(config)).train()
    assert check_loss(model, model, CPU) < 1e-5
    check_batches(model, model, CPU, packing=False)


@pytest.mark.parametrize("error", [AttributeError("no such part"), NotImplementedError("this path"), KeyError("name")])
def test_an_error_of_the_models_own_code_is_said_with_its_place(error: Exception) -> None:
    model = LossModel(tiny_model("llama"))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    model.model.model.layers[1].mlp.forward = fail
    with pytest.raises(UserError, match="LlamaForCausalLM cannot be computed") as refused, foreign_errors(model):
        check_loss(model, model, CPU)
    assert type(error).__name__ in refused.value.why and "test_loss.py, line" in refused.value.where
    with pytest.raises(torch.OutOfMemoryError), foreign_errors(model):  # a smaller micro-batch may fit
        raise torch.OutOfMemoryError("full")
    with pytest.raises(RuntimeError, match="another rank"), foreign_errors(model):
        raise RuntimeError("another rank has left")


def test_a_shrunken_copy_that_fails_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    no_logits: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(LossModel, "logits", lambda *_: no_logits["gone"])
    verdict = probe(tiny_config("llama"))
    assert verdict["trains"] and not verdict["packs"] and "KeyError: 'gone'" in verdict["reason"]


def test_next_token_logits_are_those_of_the_last_position() -> None:
    model = tiny_model("qwen3", "float64").eval()
    ids = make_batch()["input_ids"]
    torch.testing.assert_close(LossModel(model).next_token_logits(ids), model(ids, use_cache=False).logits[:, -1])


def test_a_router_loss_is_not_dropped_silently() -> None:
    model = tiny_model("llama")
    model.config.output_router_logits = True
    with pytest.raises(UserError, match="router"):
        LossModel(model)


def weigh(batch: dict[str, torch.Tensor], seed: int = 5) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return batch | {"loss_weights": torch.randint(0, 4, batch["labels"].shape, generator=draw) / 2}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weighted_loss_and_gradients_equal_three_lines_in_float64(small_chunks: None, family: str) -> None:
    model = tiny_model(family, "float64")
    batch = weigh(make_batch())
    log_p = model(batch["input_ids"], use_cache=False).logits.log_softmax(-1)
    kept = batch["labels"] != IGNORED
    expected = -(
        log_p[kept].gather(1, batch["labels"][kept][:, None])[:, 0] * batch["loss_weights"][kept].double()
    ).sum()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    terms = LossModel(model)(batch, metrics=True)
    loss_sum, weight = terms["lm"]
    loss_sum.backward()
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-12)
    assert weight.item() == batch["loss_weights"][kept].double().sum().item()
    assert terms["correct"][1] == kept.sum()  # accuracy counts tokens
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-11, msg=name)


def test_weights_of_one_change_no_bit_and_without_them_the_weight_is_an_integer(small_chunks: None) -> None:
    model = LossModel(tiny_model("llama"))
    batch = make_batch()
    loss_sum, num_loss_tokens = model(batch)["lm"]
    same, weight = model(batch | {"loss_weights": torch.ones(batch["labels"].shape)})["lm"]
    assert num_loss_tokens.dtype == torch.int64 and weight.dtype == torch.float64 and num_loss_tokens == weight
    assert same.item() == pytest.approx(loss_sum.item(), rel=1e-6)


def test_a_row_of_weight_two_is_the_row_twice() -> None:
    model = LossModel(tiny_model("qwen3", "float64"))
    batch = make_batch(num_samples=2)
    weights = torch.ones(batch["labels"].shape)
    weights[1] = 2
    heavy = model(batch | {"loss_weights": weights})["lm"]
    twice = model({name: torch.cat([tensor, tensor[1:]]) for name, tensor in batch.items()})["lm"]
    assert heavy[0].item() == pytest.approx(twice[0].item(), rel=1e-12) and heavy[1] == twice[1]
