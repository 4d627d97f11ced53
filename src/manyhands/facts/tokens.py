"""What the tokens of ``model.new_tokens`` are in numbers. Imports transformers only when there are any."""

from __future__ import annotations

from pathlib import Path

from manyhands.config.schema import ModelSection
from manyhands.facts.types import ModelFacts, NewTokens


def find_new_tokens(model: ModelSection, folder: Path, vocab_size: int) -> NewTokens | None:
    """Ids of the asked tokens, and the rows they need; None where none are asked.

    The vocabulary grows to exactly what is needed. Models whose matrices have more rows than the tokenizer has tokens
    (Qwen, Gemma: rounded up for speed) keep their size as long as that is enough.
    """
    if not model.new_tokens:
        return None
    from manyhands.data.tokenizer import load_tokenizer

    known = load_tokenizer(folder, trust_remote_code=model.trust_remote_code).get_vocab()
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code, new_tokens=model.new_tokens)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in model.new_tokens}
    return NewTokens(
        ids=tuple(ids.values()),
        fresh_ids=tuple(number for token, number in ids.items() if token not in known),
        vocab_size=max(vocab_size, 1 + max(ids.values())),
    )


def grow(model: ModelFacts, new_tokens: NewTokens | None) -> ModelFacts:
    """The model's dimensions with rows for the new tokens."""
    if new_tokens is None or new_tokens.vocab_size == model.vocab_size:
        return model
    rows = (new_tokens.vocab_size - model.vocab_size) * (1 if model.tied_embeddings else 2)
    return model.model_copy(
        update={"vocab_size": new_tokens.vocab_size, "num_parameters": model.num_parameters + rows * model.hidden_size}
    )
