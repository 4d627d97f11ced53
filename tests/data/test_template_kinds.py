"""What stock chat templates do at the borders of a turn, each in a template of a few lines: what the model must write
is trained.
"""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.data.chat.render import Renderer, render
from manyhands.data.read.formats import Conversation
from manyhands.data.read.messages import RowRefused

from .conftest import make_tokenizer
from .families import trained_texts

U, A = "user", "assistant"
TWO = [
    {"role": U, "content": "Hi"},
    {"role": A, "content": "Hello"},
    {"role": U, "content": "Bye"},
    {"role": A, "content": "Fine."},
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


def calling(content: str | None, **more: Any) -> list[dict]:
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
    return [
        {"role": U, "content": "Hi"}, {"role": A, "content": content, "tool_calls": [call], **more},
        {"role": "tool", "content": "sunny", "tool_call_id": "call00001"}, {"role": A, "content": "Fine.", **more},
    ]  # fmt: skip


def tokenizer_of(template: str, *, trim_offsets: bool = True) -> Any:
    tokenizer = make_tokenizer(trim_offsets=trim_offsets)
    tokenizer.chat_template = template
    return tokenizer


def shown(template: str, messages: list[dict], tools: list[dict] | None = None, **arguments: Any) -> list[str]:
    tokenizer = tokenizer_of(template)
    return trained_texts(tokenizer, render(Conversation(messages, tools), tokenizer, **arguments))


def notes_of(template: str, messages: list[dict], tools: list[dict] | None = None) -> str:
    renderer = Renderer(tokenizer_of(template))
    (rendered,) = renderer.render_many([Conversation(messages, tools)])
    assert not isinstance(rendered, RowRefused), rendered
    return "; ".join(renderer.notes())


# after Cohere2: two tokens end a turn, and an answer opens otherwise than the prompt, whose thinking is empty
SEVERAL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<start_of_turn>{{ m.content }}<end_of_turn>"
    "{% else %}{{ m.content }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
)


def test_every_token_that_ends_a_turn_is_trained_and_what_the_prompt_does_not_supply() -> None:
    assert shown(SEVERAL, TWO) == [f"<start_of_turn>{answer}<end_of_turn></s>" for answer in ("Hello", "Fine.")]


def test_a_header_that_always_opens_the_next_answer_is_not_trained() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}"
    )
    assert shown(template, TWO) == ["Hello</s>", "Fine.</s>"]


def test_a_turn_may_end_otherwise_where_the_conversation_ends() -> None:
    """After gpt-oss: one token before a question, another at the end."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if loop.last %}</s>{% else %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert shown(template, TWO) == ["Hello<|im_end|>", "Fine.</s>"]


CALLS = (
    "{% for call in m.tool_calls %}[INST]{{ call.function.name }} {{ call.function.arguments | tojson }}[/INST]"
    "{% endfor %}"
)
HEADER = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
FOOTER = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ONE_CALL = '[INST]look {"x": 1}[/INST]<|im_end|>'


@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize(
    "answer",
    [
        "{% if m.content is none %}"
        + CALLS
        + "{% else %}{{ m.content }}{% endif %}",  # shows calls for null alone, after R1-Distill
        "{{ m.content }}" + CALLS,  # writes null as None
    ],
)
def test_a_call_is_shown_in_the_form_that_the_template_takes(answer: str, content: str | None) -> None:
    assert shown(HEADER + answer + FOOTER, calling(content)) == [ONE_CALL, "Fine.<|im_end|>"]


@pytest.mark.parametrize("content", ["", None, "Look."])
@pytest.mark.parametrize("written", ["{{ m.content }}", "{{ m.content + '' }}"])
def test_a_call_that_the_template_does_not_show_is_refused_and_named(written: str, content: str | None) -> None:
    """Else an empty answer, or the word None, would be trained in its place."""
    with pytest.raises(
        RowRefused, match=r"does not show the tool call look of message 2|does not support tool calls"
    ) as caught:
        shown(HEADER + written + FOOTER, calling(content))
    assert "samples with tool calls" in str(caught.value)


def test_tool_data_on_a_template_without_tools_says_so() -> None:
    """A template that fails on the tool's result: its own words are not what the user can act on."""
    failing = HEADER + "{{ (m.content or '') + (1 if m.role == 'tool' else '') }}" + FOOTER
    with pytest.raises(
        RowRefused,
        match=r"does not support tool calls: leave out .* \(the chat template refuses .*can only concatenate str",
    ):
        shown(failing, calling(None))


def test_what_the_template_leaves_out_is_named() -> None:
    template = HEADER.replace("messages", "messages if m.role in ('user', 'assistant')")
    template += "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}" + FOOTER
    messages = [{"role": "system", "content": "Be kind."}, *calling("Look.")]
    notes = notes_of(template, messages, TOOLS)
    for what in (
        "messages of the role system",
        "messages of the role tool",
        "text beside a tool call",
        "the definitions of tools",
    ):
        assert f"leaves out {what}" in notes
    assert (
        notes_of(
            HEADER + "{{ m.content }}" + CALLS + "{% if loop.first and tools %}{{ tools }}{% endif %}" + FOOTER,
            messages,
            TOOLS,
        )
        == ""
    )


@pytest.mark.parametrize("answer", [{"reasoning_content": "Hm,  so"}, {"thinking": "Hm,  so"}, {}])
def test_thinking_that_the_template_leaves_out_is_named(answer: dict[str, str]) -> None:
    """As templates of models that do not think do with the key, and those of DeepSeek R1 with the content."""
    content = "Yes." if answer else "<think>Hm,  so</think>Yes."
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": content, **answer}]
    bare = HEADER + "{{ m.content.split('</think>')[-1] }}" + FOOTER
    assert "leaves out the thinking of answers" in notes_of(bare, messages)
    thoughts = "{{ (m.thinking or m.reasoning_content or '') | replace('  ', '\n') }}"
    assert notes_of(HEADER + thoughts + "{{ m.content }}" + FOOTER, messages) == ""
    plain = [messages[0], {"role": "assistant", "content": "Yes."}]
    assert notes_of(bare, plain) == ""


BLANK = (
    "{% for m in messages %}{{ {'user': 'User', 'assistant': 'Assistant'}[m.role] }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_prompt_that_ends_in_a_blank_leaves_no_word_untrained(trim_offsets: bool) -> None:
    """The blank and the answer's first word are one token: it carries the word, so it is trained."""
    tokenizer = tokenizer_of(BLANK, trim_offsets=trim_offsets)
    (rendered,) = Renderer(tokenizer).render_many([Conversation(TWO)])
    assert not isinstance(rendered, RowRefused)
    assert tokenizer.tokenize("Assistant: Fine.")[-2:] == ["ĠFine", "."]
    assert [part.lstrip() for part in trained_texts(tokenizer, rendered)] == ["Hello</s>", "Fine.</s>"]


def test_the_argument_that_ends_the_last_turn_is_named() -> None:
    """After Apertus and Apriel: without it the last turn of a sample has no end to train."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if not loop.last or whole %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert shown(template, TWO) == ["Hello<|im_end|>", "Fine."]
    assert "data.chat_template_kwargs: {whole: true}" in notes_of(template, TWO)
    assert shown(template, TWO, chat_template_kwargs={"whole": True}) == ["Hello<|im_end|>", "Fine.<|im_end|>"]


# after Gemma 4 and Solar: results repeat the names of calls, thinking is shown behind the last question alone
RESULT_NAMES = (
    "{% for m in messages %}{% if m.role == 'tool' %}[/INST]look {{ m.content }}<end_of_turn>{% else %}"
    "{% if not loop.first and loop.previtem.role != 'tool' or loop.first %}<|im_start|>{{ m.role }}\n{% endif %}"
    "{% if m.reasoning_content and (messages | length < 5 or loop.last) %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for call in m.tool_calls %}<start_of_turn>{{ call.function.name }}{% endfor %}"
    "{% if not m.tool_calls %}{{ m.content }}<|im_end|>{% else %}[INST]{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n<think></think>{% endif %}"
)


def test_calls_whose_names_stand_in_results_too() -> None:
    messages = calling("", reasoning_content="hm")
    more = [*messages, {"role": U, "content": "Bye"}, {"role": A, "content": "Bye", "reasoning_content": "so"}]
    assert shown(RESULT_NAMES, messages) == ["hm</think><start_of_turn>look[INST]", "<think>hm</think>Fine.<|im_end|>"]
    assert shown(RESULT_NAMES, more) == ["<start_of_turn>look[INST]", "Fine.<|im_end|>", "so</think>Bye<|im_end|>"]
    assert "turns that call tools end with [INST]" in notes_of(RESULT_NAMES, messages)


def test_a_result_that_is_written_before_its_calls_text_is_never_trained() -> None:
    """After Gemma 4: call, result, and only then the text that stood beside the call."""
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}" + CALLS +
        "{{ messages[loop.index].content }}{% endif %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip
    with pytest.raises(RowRefused, match="result of a tool before the text of message 2"):
        shown(template, calling("Look."))


def test_an_empty_answer_that_is_not_closed_is_refused_with_what_to_do() -> None:
    """After Seed-OSS, which shows a header alone."""
    template = HEADER + "{% if m.content %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    empty = [TWO[0], {"role": A, "content": ""}, *TWO[2:]]
    with pytest.raises(
        RowRefused, match="message 2 is empty, and the chat template does not close it: give it a text, or leave it out"
    ):
        shown(template, empty)
    assert shown(template, TWO) == ["Hello<|im_end|>", "Fine.<|im_end|>"]


def test_a_call_whose_name_stands_in_the_text_beside_it_is_not_shown_by_that() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    with pytest.raises(RowRefused, match="does not show the tool call look"):
        shown(template, calling("I will look for it."))


def test_the_end_of_text_token_in_an_argument_does_not_end_the_call() -> None:
    """Thinking that is shown in the last turn alone, after Nemotron, so that no prefix tells where the call ends."""
    thoughts = "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    messages = calling("")
    messages[1]["tool_calls"][0]["function"]["arguments"]["x"] = "b</s>c"
    expected = [ONE_CALL.replace("1", '"b</s>c"'), "<think></think>Fine.<|im_end|>"]
    assert shown(HEADER + thoughts + "{{ m.content }}" + CALLS + FOOTER, messages) == expected


@pytest.mark.parametrize("content", ["", None])
def test_a_null_beside_a_call_is_written_as_earlier_turns_take_it(content: str | None) -> None:
    """After QwQ, which takes null in the last message alone."""
    answer = "{% if not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content or '' }}{% endif %}"
    assert shown(HEADER + answer + CALLS + FOOTER, calling(content)) == [ONE_CALL, "Fine.<|im_end|>"]


def test_text_beside_a_call_that_is_hidden_once_an_answer_follows() -> None:
    """After gpt-oss, whose results repeat the names of their calls."""
    name = ".tool_calls[0].function.name }}"
    template = (
        "{% for m in messages %}<|im_start|>{% if m.role == 'tool' %}{{ loop.previtem" + name + "{% else %}{{ m.role }}"
        "{% endif %}\n{% if m.tool_calls %}{{ m.content if loop.last else '' }}[INST]{{ m" + name + "</s>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert shown(template, calling("Wait.")) == ["[INST]look</s>", "Fine.<|im_end|>"]
    assert "leaves out text beside a tool call" in notes_of(template, calling("Wait."))


def test_the_thinking_of_an_answer_that_nothing_was_asked_for() -> None:
    """After Qwen3.5 with an empty thinking in its prompt: the turn begins where it differs from that."""
    think = "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
    template = HEADER + think + "{{ m.content }}" + FOOTER.replace("assistant\n", "assistant\n<think></think>")
    messages = [{**TWO[1], "reasoning_content": "Because of this"}, *TWO[2:]]
    assert shown(template, messages) == ["Because of this</think>Hello<|im_end|>", "Fine.<|im_end|>"]
