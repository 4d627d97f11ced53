"""What a tokenizer that the caller has changed means for a run, as training arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhands.api.model import LanguageModel
from manyhands.core.errors import UserError


def differences(tokenizer: Any, model: LanguageModel) -> dict[str, Any]:
    """``chat_template``, ``eos_token`` and ``new_tokens`` where they are not those of the model's own tokenizer.

    UserError where the run would train other token ids than ``tokenizer`` makes. The padding token does not matter:
    padding is not trained.
    """
    from manyhands.data.tokenizer import load_tokenizer
    from manyhands.facts.hub import locate_model

    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    given = model.given
    folder = locate_model(given["model_name"], given.get("revision"), False)
    own = load_tokenizer(Path(folder), trust_remote_code=bool(given.get("trust_remote_code")))
    found: dict[str, Any] = {}
    if tokenizer.chat_template != own.chat_template:
        found["chat_template"] = tokenizer.chat_template
    if tokenizer.eos_token != own.eos_token:
        found["eos_token"] = tokenizer.eos_token
    before, now = own.get_vocab(), tokenizer.get_vocab()
    added = sorted((token for token in now.keys() - before.keys()), key=now.__getitem__)
    if any(now.get(token) != number for token, number in before.items()):
        raise UserError(
            "the tokenizer is not the model's",
            where=str(getattr(tokenizer, "name_or_path", "")),
            why=f"tokens have other numbers than in {folder}",
            fix="give the tokenizer that from_pretrained returned, or leave it out",
        )
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if plain := [token for token in added if token not in special]:
        raise UserError(
            f"the tokenizer has {len(plain)} added tokens that are not special",
            why=f"such as {plain[0]!r}; a run adds special tokens only",
            fix="add them with tokenizer.add_tokens([...], special_tokens=True)",
        )
    if tokenizer.bos_token != own.bos_token:
        raise UserError(
            f"the tokenizer begins texts with {tokenizer.bos_token!r}, the model's own with {own.bos_token!r}",
            fix="leave bos_token as it is",
        )
    if added:
        found["new_tokens"] = added
    return found
