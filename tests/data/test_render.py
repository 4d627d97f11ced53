"""Ids and masks of single conversations and texts: what the table of ``test_masks.py`` has no place for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.core.errors import UserError
from manyhands.data.chat.render import Rendered, Renderer, render
from manyhands.data.chat.spans import SpanFinder
from manyhands.data.chat.template import ChatTemplate, complete_arguments
from manyhands.data.read.formats import Conversation
from manyhands.data.read.messages import RowRefused
from manyhands.data.tokenize.tokenizer import encode_text, load_tokenizer
from manyhands.infer.decode import end_of_turn

from .conftest import make_tokenizer
from .families import FAMILIES, family_tokenizer, trained_texts
from .test_masks import CONVERSATIONS, EXPECTED, IM_END, plain

U, A = "user", "assistant"
TURN = [{"role": U, "content": "Hi"}, {"role": A, "content": "Hello there"}]
TWO = [*TURN, {"role": U, "content": "Bye"}, {"role": A, "content": "Fine."}]


def shown(tokenizer: Any, messages: list[dict], **arguments: Any) -> list[str]:
    return trained_texts(tokenizer, render(Conversation(messages), tokenizer, **arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_masked_alike_by_its_shape_and_by_itself(family: str) -> None:
    """The fast way, one rendering a row, finds what rendering each turn finds."""
    tokenizer = family_tokenizer(family)
    template = ChatTemplate(tokenizer, complete_arguments({}, "2026-01-01"))
    finder = SpanFinder(template, [token.content for token in tokenizer.added_tokens_decoder.values()])
    shaped = [
        name
        for name, (_, tools) in CONVERSATIONS.items()
        if tools is None and not isinstance(EXPECTED[family][name], str)
    ]
    for name in shaped:
        messages = CONVERSATIONS[name][0]
        turns = [turn for turn, message in enumerate(messages) if message["role"] == A]
        text = template.render(messages)
        by_shape = finder.find(messages, None, text, turns)
        by_itself = finder.find(
            [message | {"name": "x"} for message in messages], None, text, turns
        )  # more keys: no shape
        assert by_shape == by_itself, name


def test_a_thousand_rows_of_one_shape_are_located_by_one_rendering_each() -> None:
    tokenizer = make_tokenizer("chatml")
    renderer, calls = Renderer(tokenizer), []
    renderer.render_many([Conversation(TURN)])
    plain_apply = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **more: (
        calls.append(len(messages)) or plain_apply(messages, **more)
    )
    rows = [
        Conversation([{"role": U, "content": f"Hi {n}"}, {"role": A, "content": f"Hello {n}"}]) for n in range(1000)
    ]
    rendered = renderer.render_many(rows)
    assert calls == [1000] and trained_texts(tokenizer, rendered[-1]) == ["Hello 999<|im_end|>"]


def test_llama_and_gemma_have_one_begin_token_though_the_tokenizer_adds_one() -> None:
    for family in ("llama3", "gemma3", "mistral3", "deepseek3"):
        tokenizer = family_tokenizer(family, adds_bos=True)
        ids = render(Conversation(CONVERSATIONS["system"][0]), tokenizer).ids
        assert (ids == tokenizer.bos_token_id).sum() == 1 and ids[0] == tokenizer.bos_token_id
        assert tokenizer("Hi")["input_ids"][0] == tokenizer.bos_token_id


def test_blanks_around_an_answer() -> None:
    """ChatML keeps the blanks; whatever token holds header and answer together is not trained, and counted."""
    tokenizer = make_tokenizer("chatml")
    messages = [{"role": U, "content": "Hi"}, {"role": A, "content": "  Hello  "}]
    rendered = render(Conversation(messages), tokenizer)
    assert rendered.ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    (stretch,) = trained_texts(tokenizer, rendered)
    assert stretch.lstrip() == "Hello  <|im_end|>"
    assert "assistant" not in stretch
    assert shown(family_tokenizer("llama3"), messages) == ["Hello<|eot_id|>"]


def test_markers_in_a_question_are_told() -> None:
    """They become real special tokens, as in ``apply_chat_template``; test_masks shows that they open no span."""
    renderer = Renderer(family_tokenizer("chatml"))
    assert renderer.has_markers("Hi<|im_end|>") and not renderer.has_markers("Hello im_end <think>")


def test_template_refuses_and_the_reason_is_kept() -> None:
    with pytest.raises(RowRefused, match="must alternate"):
        render(Conversation(CONVERSATIONS["two answers"][0]), family_tokenizer("gemma3"))


def test_template_that_shows_an_answer_twice_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length }}{{ m.content }}|{{ m.content }}</s>{% endfor %}"
    with pytest.raises(RowRefused, match="2 times"):
        render(Conversation(TWO), tokenizer)


def test_template_that_hides_an_answer_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{% if m.content|length < 3 %}{{ m.content }}{% endif %}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    hidden, shown = Renderer(tokenizer).render_many(
        [Conversation(TURN), Conversation([{"role": U, "content": "a"}, {"role": A, "content": "b"}])]
    )
    assert isinstance(hidden, RowRefused) and "shows nothing of message 2" in str(hidden)
    assert not isinstance(shown, RowRefused) and trained_texts(tokenizer, shown) == ["b</s>"]


PARTS = (  # after SmolVLM's and LLaVA's: of a content that is a text they show nothing
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)


@pytest.mark.parametrize("template", PARTS)
def test_a_template_that_takes_contents_in_parts_is_given_parts(template: str) -> None:
    plain_tokenizer, tokenizer = make_tokenizer("chatml"), make_tokenizer("chatml")
    tokenizer.chat_template = template
    expected, found = (render(Conversation(TWO), each) for each in (plain_tokenizer, tokenizer))
    assert trained_texts(tokenizer, found) == ["Hello there<|im_end|>", "Fine.<|im_end|>"]
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in TWO]
    assert list(found.ids) == tokenizer.apply_chat_template(parts, return_dict=False) == list(expected.ids)
    assert end_of_turn(tokenizer) == end_of_turn(plain_tokenizer) != ()


def test_a_processors_template_is_the_tokenizers_where_that_has_none(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS[0]}))
    assert load_tokenizer(tmp_path).chat_template == PARTS[0]
    assert load_tokenizer(tmp_path, "{{ 'given' }}").chat_template == "{{ 'given' }}"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(UserError, match="the chat template cannot be read"):
        load_tokenizer(tmp_path)


def test_template_without_an_end_is_an_error_that_says_what_to_give() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="nothing after an assistant turn") as caught:
        render(Conversation(TURN), tokenizer)
    assert "model.chat_template" in str(caught.value)


@pytest.mark.parametrize("ending", ["\\n", " ", "\\n\\n"])
@pytest.mark.parametrize("between", ["", "\\n"])
def test_a_template_that_ends_answers_by_white_space_alone_is_refused(ending: str, between: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{{{ '{between}' + m.role + ': ' + m.content + '{ending}' }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(UserError, match="nothing but white space after an assistant turn") as caught:
        render(Conversation(TURN), tokenizer)
    assert "eos_token behind the content" in str(caught.value)
    tokenizer.chat_template = tokenizer.chat_template.replace(f"+ '{ending}'", f"+ '###{ending}'")
    assert trained_texts(tokenizer, render(Conversation(TURN), tokenizer))[0].rstrip().endswith("###")


def test_text_keeps_the_begin_token_and_ends_with_eos_all_trained() -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    rendered = render("Hello there", tokenizer)
    assert rendered.ids.tolist() == [*tokenizer("Hello there")["input_ids"], tokenizer.eos_token_id]
    assert rendered.ids[0] == tokenizer.bos_token_id and rendered.trained.all()


def test_prompt_without_template_trains_completion_and_eos() -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    (rendered,) = Renderer(tokenizer, plain_prompts=True).render_many(
        [Conversation([{"role": U, "content": "Hello 42"}, {"role": A, "content": " Bye"}])]
    )
    assert not isinstance(rendered, RowRefused)
    assert rendered.ids.tolist() == [*tokenizer("Hello 42 Bye")["input_ids"], tokenizer.eos_token_id]
    assert trained_texts(tokenizer, rendered) == [" Bye</s>"]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_text_that_brings_special_tokens_has_them_once(adds_bos: bool, ends: bool) -> None:
    tokenizer, bos, eos = make_tokenizer(adds_bos=adds_bos), "<s>", "</s>"
    plain = [tokenizer.bos_token_id, *tokenizer("Hello 42 Bye", add_special_tokens=False)["input_ids"]]
    rendered = render(f"{bos}Hello 42 Bye{eos if ends else ''}", tokenizer)
    assert rendered.ids.tolist() == [*plain, tokenizer.eos_token_id] and rendered.trained.all()
    talk = [{"role": U, "content": f"{bos}Hello 42"}, {"role": A, "content": f" Bye{eos if ends else ''}"}]
    (joined,) = Renderer(tokenizer, plain_prompts=True).render_many([Conversation(talk)])
    assert not isinstance(joined, RowRefused) and joined.ids.tolist() == rendered.ids.tolist()
    assert trained_texts(tokenizer, joined) == [" Bye</s>"]
    twice = render(f"{bos}{bos}Hello", tokenizer).ids.tolist()
    assert twice[:2] == [tokenizer.bos_token_id] * 2, "what the text has twice stays"
    assert render(f"Hello {bos}{bos}", tokenizer).ids.tolist().count(tokenizer.bos_token_id) == 2 + adds_bos


def test_an_end_token_that_the_tokenizer_adds_is_there_once() -> None:
    from tokenizers import processors

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    wanted = tokenizer("Hello")["input_ids"]
    for text in ("Hello", "Hello</s>", "<s>Hello", "<s>Hello</s>"):
        assert render(text, tokenizer).ids.tolist() == wanted
        assert encode_text(tokenizer, text) == wanted


def test_many_at_once_equal_one_by_one_and_refusals_keep_their_place() -> None:
    tokenizer = family_tokenizer("gemma3")
    names = ["single", "two answers", "several", "characters"]
    together = Renderer(tokenizer).render_many([Conversation(*CONVERSATIONS[name]) for name in names])
    assert [isinstance(result, RowRefused) for result in together] == [False, True, False, False]
    for name, result in zip(names, together, strict=True):
        if not isinstance(result, RowRefused):
            alone = render(Conversation(*CONVERSATIONS[name]), tokenizer)
            assert np.array_equal(alone.ids, result.ids) and np.array_equal(alone.trained, result.trained)


def test_weights_of_turns_and_of_the_row_are_multiplied() -> None:
    tokenizer = family_tokenizer("chatml")
    messages = [*TURN[:1], TURN[1] | {"weight": 0.5}, TWO[2] | {"train": False}, TWO[3] | {"train": True}]
    rendered = render(Conversation(messages, weight=3.0), tokenizer)
    assert rendered.ids.tolist() == tokenizer.apply_chat_template(TWO, tokenize=True, return_dict=False)
    assert rendered.weights is not None and rendered.weights.dtype == np.float32
    assert np.array_equal(rendered.trained, rendered.weights > 0)
    assert {weight: text_of(tokenizer, rendered, weight) for weight in (1.5, 3.0)} == {
        1.5: "Hello there<|im_end|>",
        3.0: "Fine.<|im_end|>",
    }
    assert set(rendered.weights.tolist()) == {0.0, 1.5, 3.0}


def text_of(tokenizer: Any, rendered: Rendered, weight: float) -> str:
    assert rendered.weights is not None
    return tokenizer.decode(rendered.ids[rendered.weights == weight].tolist())


def test_a_turn_of_weight_0_is_not_trained_and_need_not_be_found() -> None:
    tokenizer = family_tokenizer("chatml")
    messages = [TURN[0], TURN[1] | {"train": False}, *TWO[2:]]
    rendered = render(Conversation(messages), tokenizer)
    assert trained_texts(tokenizer, rendered) == ["Fine.<|im_end|>"] and rendered.weights is None


@pytest.mark.parametrize(
    ("messages", "train_on", "reason"),
    [
        ([TURN[0], TURN[1] | {"weight": 0}], "assistant", "no loss token"),
        ([*TURN, TWO[2], TWO[3] | {"train": False}], "last", "no loss token"),
        ([TURN[0], TURN[1] | {"weight": 2}, *TWO[2:]], "last", "the last answer alone"),
        (TURN[:1], "assistant", "no assistant message"),
        ([TURN[0] | {"weight": 2}, TURN[1]], "assistant", "only assistant turns are trained"),
        ([TURN[0] | {"train": False}, TURN[1]], "all", "every message has weight 1"),
        ([TURN[0], TURN[1] | {"train": True, "weight": 0}], "assistant", "contradict"),
        ([TURN[0], TURN[1] | {"weight": 1e39}], "assistant", "larger than"),
    ],
)
def test_weights_that_train_nothing_or_do_nothing_are_refused(messages: list[dict], train_on: Any, reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        render(Conversation(messages), family_tokenizer("chatml"), train_on=train_on)


@pytest.mark.parametrize("earlier", [{"weight": 0}, {"weight": 1}, {"train": True}])
def test_earlier_answers_may_be_chosen_or_not_where_the_last_is_trained(earlier: dict[str, Any]) -> None:
    tokenizer = family_tokenizer("chatml")
    rendered = render(Conversation([TURN[0], TURN[1] | earlier, *TWO[2:]]), tokenizer, train_on="last")
    assert trained_texts(tokenizer, rendered) == ["Fine.<|im_end|>"]


def test_all_tokens_with_one_turn_weighed_otherwise() -> None:
    tokenizer = family_tokenizer("chatml")
    rendered = render(Conversation([TURN[0], TURN[1] | {"weight": 2}, *TWO[2:]], weight=0.5), tokenizer, train_on="all")
    assert rendered.trained.all() and text_of(tokenizer, rendered, 1.0) == "Hello there<|im_end|>"
    assert (
        rendered.weights is not None
        and (rendered.weights == 0.5).sum() == len(rendered.ids) - (rendered.weights == 1.0).sum()
    )


def test_the_date_is_the_configs_and_not_the_clocks() -> None:
    for family, written in (("llama3", "Today Date: 09 Mar 2025"), ("mistral7", "Today is 2025-03-09.")):
        tokenizer = family_tokenizer(family)
        rendered = render(Conversation(TURN), tokenizer, date="2025-03-09")
        assert written in tokenizer.decode(rendered.ids)
        assert not np.array_equal(rendered.ids, render(Conversation(TURN), tokenizer, date="2025-03-10").ids)
    llama = family_tokenizer("llama3")
    asked = render(Conversation(TURN), llama, chat_template_kwargs={"date_string": "a day"}, date="2025-03-09")
    assert "Today Date: a day" in llama.decode(asked.ids)


def test_chat_template_kwargs_reach_the_template() -> None:
    qwen, llama = family_tokenizer("qwen3"), family_tokenizer("llama3")
    assert shown(qwen, TURN, chat_template_kwargs={"enable_thinking": False}) == [
        "Hello there<|im_end|>"
    ]  # the prompt holds the block
    messages, tools = CONVERSATIONS["tools"]
    ended = render(Conversation(messages, tools), llama, chat_template_kwargs={"builtin_tools": ["search"]})
    assert trained_texts(llama, ended)[0].endswith("}<|eom_id|>")


def test_arguments_of_single_rows_take_precedence_over_the_run_s() -> None:
    qwen = family_tokenizer("qwen3")
    renderer = Renderer(qwen, chat_template_kwargs={"enable_thinking": False})
    own = [None, {"enable_thinking": True}, None, {"enable_thinking": True}, {"tools": []}]
    rendered = renderer.render_many([Conversation(TURN, arguments=arguments) for arguments in own])
    without, thinking = trained_texts(qwen, rendered[0]), trained_texts(qwen, rendered[1])
    assert without == trained_texts(qwen, rendered[2]) == ["Hello there<|im_end|>"]
    assert thinking == trained_texts(qwen, rendered[3]) == shown(qwen, TURN) != without
    assert isinstance(rendered[4], RowRefused) and "chat_template_kwargs of the row" in str(rendered[4])


@pytest.mark.parametrize(
    ("arguments", "date", "named"),
    [
        ({"tools": []}, "2026-01-01", "tools"),
        ({"add_generation_prompt": True}, "2026-01-01", "add_generation_prompt"),
        ({}, "2026-02-30", "02-30"),
    ],
)
def test_reserved_arguments_and_no_dates_are_refused(arguments: dict, date: str, named: str) -> None:
    with pytest.raises(UserError, match="arguments of the chat template") as caught:
        Renderer(family_tokenizer("chatml"), chat_template_kwargs=arguments, date=date)
    assert named in caught.value.details[0]


@pytest.mark.parametrize(("id", "reason"), [("short", "nine characters"), ("call000012", "nine characters")])
def test_mistrals_ids_of_nine_characters(id: str, reason: str) -> None:
    messages, tools = CONVERSATIONS["tools"]
    named = [
        message | ({"tool_calls": [message["tool_calls"][0] | {"id": id}]} if "tool_calls" in message else {})
        for message in messages
    ]
    with pytest.raises(RowRefused, match=reason):
        render(Conversation(named, tools), family_tokenizer("mistral3"))


def test_llamas_single_call_a_turn() -> None:
    messages, tools = CONVERSATIONS["tools"]
    twice = [
        message | ({"tool_calls": message["tool_calls"] * 2} if "tool_calls" in message else {}) for message in messages
    ]
    with pytest.raises(RowRefused, match="single tool calls"):
        render(Conversation(twice, tools), family_tokenizer("llama3"))
    both = render(Conversation(twice, tools), family_tokenizer("qwen3"))
    assert trained_texts(family_tokenizer("qwen3"), both)[0].count("</tool_call>") == 2


def test_a_template_without_end_tokens_is_told() -> None:
    for family in FAMILIES:
        renderer = Renderer(family_tokenizer(family))
        renderer.render_many([Conversation(TURN)])
        assert any("writes no end-of-turn token" in note for note in renderer.notes()) == family.startswith("glm"), (
            family
        )
        assert any(
            "<|endoftext|> at a sample's end is not trained" in note for note in renderer.notes()
        ) == family.startswith("phi"), family


def test_half_a_surrogate_pair_is_refused_and_the_other_rows_are_not() -> None:
    broken, whole = Renderer(family_tokenizer("chatml")).render_many(
        [Conversation([TURN[0] | {"content": "\ud800"}, TURN[1]]), "Hello"]
    )
    assert isinstance(broken, RowRefused) and isinstance(whole, Rendered)


def test_the_digest_names_all_that_decides_about_ids(tmp_path: Path) -> None:
    from manyhands.data.tokenize.tokenizer import tokenizer_digest

    family_tokenizer("qwen3").save_pretrained(tmp_path)
    seen = [tokenizer_digest(tmp_path), tokenizer_digest(tmp_path, "{{ messages }}")]
    assert tokenizer_digest(tmp_path) == seen[0]
    changes = {
        "chat_template.jinja": "{{ messages[0] }}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "tokenization_own.py": "x = 1",
        "config.json": '{"model_type": "llama"}',
    }
    for name, text in changes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        seen.append(tokenizer_digest(tmp_path))
    assert len(set(seen)) == len(seen)


@pytest.mark.real
def test_smollm2(smollm2: Path) -> None:
    from manyhands.data.tokenize.tokenizer import load_tokenizer

    tokenizer, expected = load_tokenizer(smollm2), plain(IM_END)
    names = [name for name in expected if name != "answer first" and CONVERSATIONS[name][1] is None]
    for name in names:
        messages = CONVERSATIONS[name][0]
        rendered = render(Conversation(messages), tokenizer)
        assert rendered.ids.tolist() == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert trained_texts(tokenizer, rendered) == expected[name], name
