"""A small byte-level tokenizer for each template fixture, with the family's own markers as added tokens; nothing is
downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
WORDS = (
    "Hello there, how are you? Fine. user assistant system model 42 43 Bye Hi   \n\n Be kind. Look it up."
    " get_weather city Paris sunny"
)


@dataclass(frozen=True)
class Family:
    bos: str | None
    eos: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()  # added tokens that are no special ones


def _list(tokens: str) -> tuple[str, ...]:
    return tuple(tokens.split())


CHATML = Family(None, "<|im_end|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
MISTRAL = Family(
    "<s>",
    "</s>",
    _list(
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
        "[SYSTEM_PROMPT] [/SYSTEM_PROMPT]"
    ),
)
PHI = Family(
    None,
    "<|endoftext|>",
    _list(
        "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|> "
        "<|tool|> <|/tool|> <|tool_call|> <|/tool_call|> <|tool_response|>"
    ),
)
DEEPSEEK = Family(
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    _list(
        "<｜User｜> <｜Assistant｜> <think> </think> "
        "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
        "<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
    ),
)
GLM = Family(
    None,
    "<|endoftext|>",
    _list("<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"),
    _list(
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
        "<arg_key> </arg_key> <arg_value> </arg_value>"
    ),
)

FAMILIES: dict[str, Family] = {
    "chatml": CHATML,
    "llama3": Family("<|begin_of_text|>", "<|eot_id|>",
                     ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")),
    "qwen3": Family(None, "<|im_end|>", CHATML.special,
                    ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")),
    "gemma3": Family("<bos>", "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "mistral3": MISTRAL,
    "mistral7": MISTRAL,
    "phi35": PHI,
    "phi4": PHI,
    "deepseek3": DEEPSEEK,
    "deepseek1": DEEPSEEK,
    "glm4": GLM,
    "glm45": GLM,
}  # fmt: skip


def train_tokenizer(
    special: Sequence[str], text: str, num_tokens: int, bos: str | None, eos: str | None, **how: bool
) -> Any:
    """A byte-level tokenizer with these special tokens, whose others are frequent in ``text``. ``how``:
    ``trim_offsets``, and ``adds_bos`` in front of every text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text] * 50, trainer)
    last: Any = processors.ByteLevel(trim_offsets=how.get("trim_offsets", True))
    if how.get("adds_bos") and bos is not None:
        tokens = [(bos, backend.token_to_id(bos))]
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=tokens)
        last = processors.Sequence([last, template])
    backend.post_processor = last
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)


@cache
def family_tokenizer(name: str, trim_offsets: bool = True, adds_bos: bool = False) -> Any:
    """The tokenizer of a family with its template. Shared: to be read only."""
    family = FAMILIES[name]
    how = {"trim_offsets": trim_offsets, "adds_bos": adds_bos}
    tokenizer = train_tokenizer(family.special, WORDS, 420, family.bos, family.eos, **how)
    if family.plain:
        tokenizer.add_tokens(list(family.plain))
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def trained_texts(tokenizer: Any, rendered: Any) -> list[str]:
    """The stretches of trained tokens, decoded."""
    groups = groupby(zip(rendered.ids.tolist(), rendered.trained.tolist(), strict=True), key=lambda pair: pair[1])
    return [
        tokenizer.decode([id for id, _ in group], clean_up_tokenization_spaces=False)
        for trained, group in groups
        if trained
    ]
