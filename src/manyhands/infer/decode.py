"""Answers to a batch of prompts: one forward pass a token with a cache, each row as if it were alone.

``model.generate`` of transformers prepares mask, positions and cache as the model's family needs them; the loop is ours
(``custom_generate``), because rows must not depend on each other: random numbers by prompt, penalties that do not see
the padding, stop strings by row, and rows that are done leave the batch. ``greedy`` needs no cache, as sharded models
need. Also which tokens end an answer. Knows no run folders.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from manyhands.core.progress import advance
from manyhands.data.chat.template import ChatTemplate
from manyhands.infer.settings import GenerationSettings
from manyhands.model.attention import plain_attention
from manyhands.model.structure import set_attention

COMPACT_BELOW = 0.75  # rows still active, as a share of the batch; each time costs a copy of the cache
EXACT_LAYERS = {"full_attention", "sliding_attention"}  # what such a layer computes does not depend on padding
# Frequencies by a row's length, of which the cache has those of earlier tokens; some families begin a cache again where
# the longest row passes the bound, padding included.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
INCOMPLETE = "\ufffd"  # what a tokenizer writes for a character whose last bytes are still to come

OnText = Callable[[int, str], object]


@dataclass(frozen=True)
class Completion:
    """``ids`` are the new tokens without the one that ended them; ``text`` is without special tokens, blanks around it
    and the stop string. ``finish_reason``: ``stop`` (an end token or a stop string) or ``length``.
    """

    ids: tuple[int, ...]
    text: str
    finish_reason: str


class TextStream:
    """The text of tokens as they come, whole characters only (a character may have several tokens)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._shown = 0  # tokens before ``_start`` are not decoded again; those before ``_shown`` are out

    def add(self, token: int) -> str:
        """What the token adds to the text; "" while a character is incomplete."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._shown])
        text = self._decode(self._ids[self._start :])
        if text.endswith(INCOMPLETE) or len(text) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


@dataclass
class _Row:
    """One prompt of the batch while it is answered."""

    number: int  # position among the prompts of the call
    new: list[int] = field(default_factory=list)
    text: str = ""  # kept only where a stop string may be in it
    done: bool = False
    finish_reason: str = "length"
    stream: TextStream | None = None
    num_shown: int = 0  # characters handed out


def can_pad(config: Any) -> bool:
    """Whether prompts of unequal lengths may share a batch: padding on the left changes nothing of what the others see.

    Not where a layer keeps a state over all positions (linear attention, convolutions), attends in chunks counted from
    the batch's first position, or rotates by the length of a row.
    """
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None) or ()
    if not set(layers) <= EXACT_LAYERS:
        return False
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = [ropes.get("rope_type"), *(rope.get("rope_type") for rope in ropes.values() if isinstance(rope, dict))]
    return not LENGTH_DEPENDENT_ROPE & {kind for kind in kinds if kind}


@torch.no_grad()
def complete(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    end_ids: Collection[int],
    numbers: Sequence[int] | None = None,
    on_text: OnText | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    on_token: Callable[[], object] | None = None,
) -> list[Completion]:
    """Answers all ``prompts`` (token ids) in one batch, in their order.

    ``numbers`` seed the prompts where answers are sampled (default: their positions). ``on_text(position, text)`` is
    called with each new piece of text, without blanks in front and without what may become a stop string. In float32
    an answer has the tokens that it has alone; in bfloat16 two nearly equal logits may change places. ValueError where
    unequal lengths cannot share a batch (``can_pad``). ``inputs``: further inputs of a single prompt, its images.
    ``on_token`` is called after each forward pass, also where no text can be shown yet, and may raise.
    """
    causal: Any = model
    if len({len(prompt) for prompt in prompts}) > 1 and not can_pad(causal.config):
        raise ValueError("prompts of unequal lengths in a batch of a model for which padding is not exact")
    keys = range(len(prompts)) if numbers is None else numbers
    batch = _Batch(tokenizer, prompts, settings, frozenset(end_ids), keys, on_text, on_token, causal.device)
    from transformers import GenerationConfig

    ends = sorted(end_ids)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=settings.max_new_tokens,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    with plain_evaluation(model):
        given = {"input_ids": batch.ids, "attention_mask": batch.mask, **(inputs or {})}
        causal.generate(**given, generation_config=config, custom_generate=batch.decode)
    return [batch.finish(row) for row in batch.rows]


class _Batch:
    """The rows of one call, and the loop over tokens."""

    def __init__(
        self,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        end_ids: frozenset[int],
        numbers: Sequence[int],
        on_text: OnText | None,
        on_token: Callable[[], object] | None,
        device: torch.device,
    ) -> None:
        self._tokenizer, self._settings, self._end_ids = tokenizer, settings, end_ids
        self._on_text, self._on_token = on_text, on_token
        longest = max(map(len, prompts))
        self.ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        self.mask = torch.zeros_like(self.ids)
        for row, prompt in enumerate(prompts):
            self.ids[row, longest - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.int64)
            self.mask[row, longest - len(prompt) :] = 1
        self.ids, self.mask = self.ids.to(device), self.mask.to(device)
        follows_text = bool(settings.stop) or on_text is not None
        self.rows = [
            _Row(number, stream=TextStream(tokenizer) if follows_text else None) for number in range(len(prompts))
        ]
        self._draws = None if settings.is_greedy else _draw(settings, numbers).to(device)
        self._seen: torch.Tensor | None = None  # bool (rows, vocabulary): tokens of the prompt and the answer
        self._active = list(self.rows)

    def decode(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """The loop, as ``model.generate`` calls it. Processors and criteria are those of ``generation_config.json``,
        which are not asked for."""
        for step in range(self._settings.max_new_tokens):
            inputs = model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=1 if step else None, is_first_iteration=step == 0, **model_kwargs
            )
            outputs = model(**inputs, return_dict=True)
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
            logits = outputs.logits[:, -1].to(self.ids.device, torch.float32, copy=True)
            del outputs  # a prompt's logits may be large
            tokens = self._choose(logits, step)
            self._take(tokens.tolist())
            advance()
            if self._on_token is not None:
                self._on_token()
            if all(row.done for row in self._active):
                break
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
            input_ids = self._compact(model, input_ids, model_kwargs)
        return input_ids

    def _choose(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """The next token of each active row, int64 (rows)."""
        settings = self._settings
        if settings.repetition_penalty != 1:
            if self._seen is None:
                self._seen = torch.zeros_like(logits, dtype=torch.bool)
                rows, columns = self.mask.nonzero(as_tuple=True)
                self._seen[rows, self.ids[rows, columns]] = True
            penalty = settings.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        tokens = logits.argmax(-1) if self._draws is None else sample(logits, self._draws[:, step], settings)
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        return tokens

    def _take(self, tokens: list[int]) -> None:
        """Adds one token to each active row and notes which of them are done."""
        for row, token in zip(self._active, tokens, strict=True):
            if row.done:
                continue
            if token in self._end_ids:
                row.done, row.finish_reason = True, "stop"
            else:
                row.new.append(token)
                if row.stream is not None:
                    added = row.stream.add(token)
                    start = max(0, len(row.text) - max(map(len, self._settings.stop), default=0))
                    row.text += added
                    if (end := find_stop(row.text, self._settings.stop, start)) is not None:
                        row.text, row.done, row.finish_reason = row.text[:end], True, "stop"
                    elif added:
                        self._show(row, final=False)
            if row.done or len(row.new) == self._settings.max_new_tokens:
                self._show(row, final=True)

    def _show(self, row: _Row, *, final: bool) -> None:
        """Hands out the text that is certain: not what a stop string may begin with, nor blanks at the end."""
        if self._on_text is None or row.stream is None:
            return
        text = row.text.lstrip()
        certain = len(text.rstrip())
        if not final:
            certain = min(certain, len(text) - _held_back(text, self._settings.stop))
        if certain > row.num_shown:
            self._on_text(row.number, text[row.num_shown : certain])
            row.num_shown = certain

    def _compact(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        """Drops rows that are done once they are many, where every tensor of the batch is known."""
        kept = [position for position, row in enumerate(self._active) if not row.done]
        if len(kept) > COMPACT_BELOW * len(self._active) or not _can_compact(model_kwargs):
            return input_ids
        index = torch.tensor(kept, device=self.ids.device)
        self._active = [self._active[position] for position in kept]
        for name in ("attention_mask", "position_ids"):
            if name in model_kwargs:
                model_kwargs[name] = model_kwargs[name][index]
        for layer in model_kwargs["past_key_values"].layers:  # each on its own device, where layers are divided
            layer.batch_select_indices(index.to(layer.keys.device))
        self._draws = None if self._draws is None else self._draws[index]
        self._seen = None if self._seen is None else self._seen[index]
        return input_ids[index]

    def finish(self, row: _Row) -> Completion:
        text = self._tokenizer.decode(row.new, skip_special_tokens=True)
        end = find_stop(text, self._settings.stop)
        return Completion(tuple(row.new), text[:end].strip(), row.finish_reason)


def _can_compact(model_kwargs: dict[str, Any]) -> bool:
    """Only attention layers, whose cache has one entry a row, and no tensor of unknown meaning. A model of images keeps
    something of each row in itself."""
    from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

    known = {"attention_mask", "position_ids", "past_key_values"}
    unknown = [key for key, value in model_kwargs.items() if isinstance(value, torch.Tensor) and key not in known]
    positions = model_kwargs.get("position_ids")
    cache = model_kwargs.get("past_key_values")
    return (
        not unknown
        and (positions is None or positions.dim() == 2)
        and all(
            isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)
            for layer in getattr(cache, "layers", [None])
        )
    )


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Where the first of the stop strings begins."""
    return min((place for stop in stops if (place := text.find(stop, start)) >= 0), default=None)


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` with which a stop string begins."""
    sizes = range(min(max(map(len, stops), default=0), len(text)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


def _draw(settings: GenerationSettings, numbers: Sequence[int]) -> torch.Tensor:
    """Random numbers in [0, 1), float64 (prompts, new tokens): functions of the seed and the prompt's number."""
    rows = [
        np.random.Generator(np.random.Philox(key=[settings.seed, number])).random(settings.max_new_tokens)
        for number in numbers
    ]
    return torch.from_numpy(np.stack(rows))


def sample(logits: torch.Tensor, draws: torch.Tensor, settings: GenerationSettings) -> torch.Tensor:
    """One token a row, by inversion: the first at which the cumulative probability of the tokens, the likeliest first,
    exceeds the row's draw.

    logits float32 (rows, vocabulary), draws float64 (rows) in [0, 1); returns int64 (rows). Temperature, then top-k,
    then top-p (the fewest tokens whose probability reaches it), renormalized, as in transformers' logits warpers.
    """
    logits = logits / settings.temperature
    if 0 < settings.top_k < logits.shape[1]:
        values, order = logits.topk(settings.top_k, dim=-1)
    else:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
    cumulative = values.softmax(-1, dtype=torch.float64).cumsum(-1)
    reached = (cumulative < settings.top_p).sum(-1, keepdim=True).clamp(max=cumulative.shape[1] - 1)  # last one kept
    target = draws[:, None] * cumulative.gather(1, reached)
    place = torch.searchsorted(cumulative, target, right=True).minimum(reached)
    return order.gather(1, place)[:, 0]


GROUPED = "manyhands_grouped"


def attend_grouped(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' ``sdpa``, but for one new token a row: query heads that share a key head are its queries.

    With a mask, which padding needs, transformers copies keys and values once for each query head; here nothing is
    copied. query (b, h, 1, d), key and value (b, g, t, d), mask (b, 1, 1, t) or none; returns (b, 1, h, d).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, length, dim = query.shape
    groups = key.shape[1]
    simple = length == 1 and groups < heads and (attention_mask is None or attention_mask.shape[1] == 1)
    if not simple or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded = query.reshape(rows, groups, heads // groups, dim)
    found = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return found.reshape(rows, 1, heads, -1), None


@contextmanager
def plain_evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with an attention that knows caches and padding; puts both back."""
    causal: Any = model
    attention, was_training = causal.config._attn_implementation, model.training
    plain: str = plain_attention(causal.config)
    if plain == "sdpa" and getattr(model, "_supports_attention_backend", False):
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

        AttentionInterface.register(GROUPED, attend_grouped)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        plain = GROUPED
    if attention != plain:
        set_attention(causal, plain)
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        if attention != plain:
            set_attention(causal, attention)


SENTINEL = "\ue000"  # private use: in no template and in no content


@torch.no_grad()
def greedy(
    next_token_logits: Callable[[torch.Tensor], torch.Tensor],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    end_ids: Collection[int],
    device: torch.device | str = "cpu",
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[int]:
    """The most likely token again and again; returns the new ids without the one that ended them.

    ``next_token_logits``: ids (1, t) -> logits of the next token, (1, v) or (v). It is called at most
    ``max_new_tokens`` times, without a cache, so that a sharded model answers where all ranks call this alike.
    ``agree`` makes a chosen token, (1, 1), the same on all ranks (a broadcast from rank 0): a tie decided in two ways
    would leave ranks waiting.
    """
    ids = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=device)
    new: list[int] = []
    for _ in range(max_new_tokens):
        token = next_token_logits(ids).reshape(-1).argmax().reshape(1, 1)
        if agree is not None:
            token = agree(token)
        if int(token) in end_ids:
            break
        new.append(int(token))
        ids = torch.cat([ids, token], dim=1)
    return new


def end_token_ids(
    model_folder: str | Path, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> frozenset[int]:
    """Every token that ends a turn.

    What generation_config.json (else config.json, else the tokenizer) names as end of sequence, and the token that the
    chat template puts after an assistant's words: many models name only one of the two.
    """
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_folder) / name
        stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if stated is not None:
            ends |= {stated} if isinstance(stated, int) else set(stated)
            break
    ends |= set(end_of_turn(tokenizer, chat_template_kwargs))
    if not ends and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return frozenset(ends)


def special_ids(tokenizer: Any) -> set[int]:
    """Of all special tokens, those included that have no name in the tokenizer (``<|start_header_id|>``)."""
    return {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def end_of_turn(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """The special tokens that close an assistant's turn by the template: some close the last one otherwise than those
    before it. Of several in a row the first, at which an answer is complete. None of a conversation that the template
    refuses, such as one with a second question.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ()
    special = special_ids(tokenizer)
    template = ChatTemplate(tokenizer, chat_template_kwargs or {})
    user, assistant = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": SENTINEL}
    asked, last, inner = map(template.try_render, ([user], [user, assistant], [user, assistant, user]))

    def encode_tail(text: str | None) -> list[int]:
        """The tokens behind the answer; none where the template refuses the conversation or does not show it."""
        _, shown, tail = (text or "").rpartition(SENTINEL)
        return list(tokenizer.encode(tail.strip(), add_special_tokens=False)) if shown else []

    # What both end with is the second question. By tokens: ``<|im_start|>`` and ``<|im_end|>`` end in the same letters.
    between, question = encode_tail(inner if asked else None), encode_tail(SENTINEL + (asked or ""))
    pairs = zip(reversed(between), reversed(question), strict=False)
    num_common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    closing = encode_tail(last), between[: len(between) - num_common]
    first = (next((token for token in ids if token in special), None) for ids in closing)
    return tuple(dict.fromkeys(token for token in first if token is not None))
