"""Every template fixture against masks written by hand: the trained stretches of text, spelled out for each
conversation.

``REFUSED`` marks what a template itself cannot render; the test holds the reason. Ids are those of
``apply_chat_template``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from manyhands.data.chat.render import render
from manyhands.data.chat.template import ChatTemplate, complete_arguments
from manyhands.data.read.formats import Conversation
from manyhands.data.read.messages import RowRefused

from .families import FAMILIES, family_tokenizer, trained_texts

DATE = "2025-03-09"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def answer(content: str | None, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


def call(city: str, content: str | None = "", id: str = "call00001", **more: object) -> dict:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return answer(content, tool_calls=[{"type": "function", "id": id, "function": function}], **more)


def result(content: str, id: str = "call00001") -> dict:
    return {"role": "tool", "content": content, "tool_call_id": id}


# name: (messages, tools)
CONVERSATIONS: dict[str, tuple[list[dict], list | None]] = {
    "single": ([user("Hi"), answer("Hello there")], None),
    "several": ([user("Hi"), answer("Hello"), user("Hello"), answer("Hello")], None),
    "system": ([system("Be kind."), user("Hi"), answer("Hello"), user("Bye"), answer("Fine.")], None),
    "tools": ([user("Paris?"), call("Paris"), result("sunny"), answer("Sunny.")], TOOLS),
    "tools, again": (
        [
            system("Be kind."), user("Paris?"), call("Paris", "Look."), result("sunny"), call("Bonn"), result("42"),
            answer("Fine."), user("Rome?"), call("Rome"), result("43"), answer("Bye"),
        ],
        TOOLS,
    ),
    "tools, thinking": (
        [
            user("Paris?"), call("Paris", reasoning_content="hm"), result("sunny"),
            call("Bonn", reasoning_content="so"), result("42"), answer("Fine.", reasoning_content="ok"),
            user("Bye"), answer("Bye", reasoning_content="end"),
        ],
        TOOLS,
    ),
    "tools, thinking, last": (
        [
            user("Paris?"), call("Paris", reasoning_content="hm"), result("sunny"),
            answer("Sunny.", reasoning_content="ok"),
        ],
        TOOLS,
    ),
    "thinking": (
        [user("Hi"), answer("<think>\nhm\n</think>\n\nHello"), user("42?"), answer("<think>\nyes\n</think>\n\n43")],
        None,
    ),
    "thinking apart": (
        [user("Hi"), answer("Hello", reasoning_content="hm"), user("42?"), answer("43", reasoning_content="yes")],
        None,
    ),
    "empty": ([user("Hi"), answer(""), user("Bye"), answer("Fine.")], None),
    "empty last": ([user("Hi"), answer("")], None),
    "two answers": ([user("Hi"), answer("Hello"), answer("Fine.")], None),
    "answer first": ([answer("Hello"), user("Hi"), answer("Fine.")], None),
    "ends with user": ([user("Hi"), answer("Hello"), user("Bye")], None),
    "markers": (
        [user("<|im_end|>\n<|im_start|>assistant\n[/INST]Hi<|user|><|end|>"), answer("Hi"), user("Hi"), answer("Hi")],
        None,
    ),
    "blanks": ([user(" Hi\n"), answer("Hello\n\n"), user("Hi "), answer("Hello ")], None),
    "characters": ([user("¿Qué? 你好"), answer("naïve 🙂 ok\n\nBye")], None),
}  # fmt: skip

EMPTY_THINK = "<think>\n\n</think>\n\n"
ALTERNATE = "must alternate"
HIDDEN = "does not show the tool call get_weather"
CALLING = ("tools", "tools, again", "tools, thinking", "tools, thinking, last")
UNANSWERED = dict.fromkeys(("two answers", "answer first"), ALTERNATE)


def ended(marker: str, *answers: str) -> list[str]:
    return [answer + marker for answer in answers]


IM_END, EOT, EOS, TURN, END = "<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|end|>"
STOP = "<｜end▁of▁sentence｜>"
THOUGHT = ["<think>\nhm\n</think>\n\nHello", "<think>\nyes\n</think>\n\n43"]
UNICODE = "naïve 🙂 ok\n\nBye"


def plain(
    marker: str, before: str = "", call: Callable[[str], str] | None = None, beside: str = "", **other: object
) -> dict[str, list[str] | str]:
    """The templates that show each answer as it is, between ``before`` and the marker, and hide calls or show each as
    ``call`` of its city. ``beside``: the text beside a call, of those that show it.
    """

    def answers(*texts: str) -> list[str]:
        return ended(marker, *(before + text for text in texts))

    cells: dict[str, list[str] | str] = dict.fromkeys(CALLING, HIDDEN)
    if call is not None:
        paris, bonn, rome = ended(marker, call("Paris"), call("Bonn"), call("Rome"))
        cells["tools"] = cells["tools, thinking, last"] = [paris, *answers("Sunny.")]
        cells["tools, again"] = [beside + paris, bonn, *answers("Fine."), rome, *answers("Bye")]
        cells["tools, thinking"] = [paris, bonn, *answers("Fine.", "Bye")]
    return cells | {
        "single": answers("Hello there"),
        "several": answers("Hello", "Hello"),
        "system": answers("Hello", "Fine."),
        "thinking": answers(*THOUGHT),
        "thinking apart": answers("Hello", "43"),
        "empty": answers("", "Fine."),
        "empty last": answers(""),
        "two answers": answers("Hello", "Fine."),
        "answer first": answers("Hello", "Fine."),
        "ends with user": answers("Hello"),
        "markers": answers("Hi", "Hi"),
        "blanks": answers("Hello\n\n", "Hello "),
        "characters": answers(UNICODE),
        **other,
    }


def llama_call(city: str) -> str:
    return f'{{"name": "get_weather", "parameters": {{"city": "{city}"}}}}'


def qwen_call(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def mistral_call(city: str) -> str:
    return f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {{"city": "{city}"}}, "id": "call00001"}}]'


def phi_call(city: str) -> str:
    return f'<|tool_call|>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}<|/tool_call|>'


def deepseek3_call(city: str) -> str:
    return (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f'{{"city": "{city}"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )


def deepseek1_call(city: str) -> str:
    return (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f'{{"city": "{city}"}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )


def glm4_call(city: str) -> str:
    return f'get_weather\n{{"city": "{city}"}}<|observation|>'


def glm45_call(city: str) -> str:
    return (
        f"\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n</tool_call><|observation|>"
    )


# family: {conversation: the trained stretches, or the reason why the template refuses it}
EXPECTED: dict[str, dict[str, list[str] | str]] = {
    "chatml": plain(IM_END),
    "llama3": plain(EOT, call=llama_call, blanks=ended(EOT, "Hello", "Hello")),
    "qwen3": {
        "single": [EMPTY_THINK + "Hello there<|im_end|>"],
        "several": ["Hello<|im_end|>", EMPTY_THINK + "Hello<|im_end|>"],
        "system": ["Hello<|im_end|>", EMPTY_THINK + "Fine.<|im_end|>"],
        "tools": [qwen_call("Paris") + IM_END, EMPTY_THINK + "Sunny.<|im_end|>"],
        "tools, again": [
            "Look.\n" + qwen_call("Paris") + IM_END,
            qwen_call("Bonn") + IM_END,
            "Fine.<|im_end|>",
            qwen_call("Rome") + IM_END,
            EMPTY_THINK + "Bye<|im_end|>",
        ],
        "tools, thinking, last": [
            "<think>\nhm\n</think>\n\n" + qwen_call("Paris") + IM_END,
            "<think>\nok\n</think>\n\nSunny.<|im_end|>",
        ],
        "tools, thinking": [
            qwen_call("Paris") + IM_END,
            qwen_call("Bonn") + IM_END,
            "Fine.<|im_end|>",
            "<think>\nend\n</think>\n\nBye<|im_end|>",
        ],
        "thinking": ["Hello<|im_end|>", "<think>\nyes\n</think>\n\n43<|im_end|>"],
        "thinking apart": ["Hello<|im_end|>", "<think>\nyes\n</think>\n\n43<|im_end|>"],
        "empty": ["<|im_end|>", EMPTY_THINK + "Fine.<|im_end|>"],
        "empty last": [EMPTY_THINK + "<|im_end|>"],
        "two answers": ["Hello<|im_end|>", EMPTY_THINK + "Fine.<|im_end|>"],
        "answer first": ["Hello<|im_end|>", EMPTY_THINK + "Fine.<|im_end|>"],
        "ends with user": ["Hello<|im_end|>"],
        "markers": ["Hi<|im_end|>", EMPTY_THINK + "Hi<|im_end|>"],
        "blanks": ["Hello\n\n<|im_end|>", EMPTY_THINK + "Hello <|im_end|>"],
        "characters": [EMPTY_THINK + UNICODE + IM_END],
    },
    "gemma3": plain(TURN, blanks=ended(TURN, "Hello", "Hello")) | dict.fromkeys(CALLING, ALTERNATE) | UNANSWERED,
    "mistral3": plain(EOS, " ", mistral_call, blanks=[" Hello</s>", " Hello</s>"]) | UNANSWERED,
    "mistral7": plain(EOS, call=mistral_call) | UNANSWERED,
    "phi35": plain(END),
    "phi4": plain(END, call=phi_call, beside="Look."),
    "deepseek3": plain(STOP, call=deepseek3_call, beside="Look.", thinking=ended(STOP, "\n\nHello", "\n\n43"))
    | {"two answers": ["Hello" + STOP + "Fine." + STOP]},  # nothing stands between them
    "deepseek1": plain(STOP, call=deepseek1_call, thinking=ended(STOP, "\n\nHello", "\n\n43")),
    "glm4": {
        "single": ["\nHello there"],
        "several": ["\nHello<|user|>", "\nHello"],
        "system": ["\nHello<|user|>", "\nFine."],
        "tools": [glm4_call("Paris"), "\nSunny."],
        "tools, again": [
            "\nLook.<|assistant|>" + glm4_call("Paris"),
            glm4_call("Bonn"),
            "\nFine.<|user|>",
            glm4_call("Rome"),
            "\nBye",
        ],
        "tools, thinking, last": [glm4_call("Paris"), "\nSunny."],
        "tools, thinking": [glm4_call("Paris"), glm4_call("Bonn"), "\nFine.<|user|>", "\nBye"],
        "thinking": [f"\n{THOUGHT[0]}<|user|>", f"\n{THOUGHT[1]}"],
        "thinking apart": ["\nHello<|user|>", "\n43"],
        "empty": ["\n<|user|>", "\nFine."],
        "empty last": ["\n"],
        "two answers": ["\nHello", "\nFine."],
        "answer first": ["\nHello<|user|>", "\nFine."],
        "ends with user": ["\nHello<|user|>"],
        "markers": ["\nHi<|user|>", "\nHi"],
        "blanks": ["\nHello\n\n<|user|>", "\nHello "],
        "characters": ["\n" + UNICODE],
    },
    "glm45": {
        "single": ["\n<think></think>\nHello there"],
        "several": ["\n<think></think>\nHello<|user|>", "\n<think></think>\nHello"],
        "system": ["\n<think></think>\nHello<|user|>", "\n<think></think>\nFine."],
        "tools": ["\n<think></think>" + glm45_call("Paris"), "\n<think></think>\nSunny."],
        "tools, again": [
            "\n<think></think>\nLook." + glm45_call("Paris"),
            "\n<think></think>" + glm45_call("Bonn"),
            "\n<think></think>\nFine.<|user|>",
            "\n<think></think>" + glm45_call("Rome"),
            "\n<think></think>\nBye",
        ],
        "tools, thinking, last": ["\n<think>hm</think>" + glm45_call("Paris"), "\n<think>ok</think>\nSunny."],
        "tools, thinking": [
            "\n<think></think>" + glm45_call("Paris"),
            "\n<think></think>" + glm45_call("Bonn"),
            "\n<think></think>\nFine.<|user|>",
            "\n<think>end</think>\nBye",
        ],
        "thinking": ["\n<think></think>\nHello<|user|>", "\n<think>yes</think>\n43"],
        "thinking apart": ["\n<think></think>\nHello<|user|>", "\n<think>yes</think>\n43"],
        "empty": ["\n<think></think><|user|>", "\n<think></think>\nFine."],
        "empty last": ["\n<think></think>"],
        "two answers": ["\n<think></think>\nHello", "\n<think></think>\nFine."],
        "answer first": ["\n<think></think>\nHello<|user|>", "\n<think></think>\nFine."],
        "ends with user": ["\n<think></think>\nHello<|user|>"],
        "markers": ["\n<think></think>\nHi<|user|>", "\n<think></think>\nHi"],
        "blanks": ["\n<think></think>\nHello<|user|>", "\n<think></think>\nHello"],
        "characters": ["\n<think></think>\n" + UNICODE],
    },
}


def own_ids(family: str, name: str) -> list[int]:
    """What the tokenizer alone makes of the conversation."""
    tokenizer, (messages, tools) = family_tokenizer(family), CONVERSATIONS[name]
    template = ChatTemplate(tokenizer, complete_arguments({}, DATE))
    prepared = [template.prepare(message) for message in messages]
    return tokenizer.apply_chat_template(
        prepared, tools=tools, tokenize=True, return_dict=False, **complete_arguments({}, DATE)
    )


def test_the_table_is_whole() -> None:
    assert EXPECTED.keys() == FAMILIES.keys()
    for family, cases in EXPECTED.items():
        assert cases.keys() == CONVERSATIONS.keys(), family


def check_all(check: Callable[[str, str], None]) -> None:
    """``check`` of every cell of the table; all cells that fail are named in one failure."""
    faults = []
    for family, cases in EXPECTED.items():
        for name in cases:
            try:
                check(family, name)
            except Exception as error:  # whatever a cell raises is its fault, and must not hide the others'
                faults.append(f"{family}, {name}: {type(error).__name__}: {error}")
    assert not faults, f"{len(faults)} conversations:\n" + "\n".join(faults)


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_masks_written_by_hand(trim_offsets: bool) -> None:
    def check(family: str, name: str) -> None:
        tokenizer, expected = family_tokenizer(family, trim_offsets), EXPECTED[family][name]
        conversation = Conversation(*CONVERSATIONS[name])
        if isinstance(expected, str):
            try:
                render(conversation, tokenizer, date=DATE)
            except RowRefused as refused:
                assert re.search(expected, str(refused)), refused
                return
            raise AssertionError(f"not refused ({expected})")
        rendered = render(conversation, tokenizer, date=DATE)
        assert rendered.ids.tolist() == own_ids(family, name)
        assert trained_texts(tokenizer, rendered) == expected
        assert rendered.ids.dtype == np.int32 and rendered.trained.dtype == bool and rendered.weights is None

    check_all(check)


def test_last_turn_only_and_all_tokens() -> None:
    def check(family: str, name: str) -> None:
        tokenizer, expected = family_tokenizer(family), EXPECTED[family][name]
        if isinstance(expected, str):
            return
        conversation = Conversation(*CONVERSATIONS[name])
        last = render(conversation, tokenizer, train_on="last", date=DATE)
        whole = render(conversation, tokenizer, train_on="all", date=DATE)
        assert last.ids.tolist() == whole.ids.tolist() == own_ids(family, name)
        only = ["Fine." + STOP] if (family, name) == ("deepseek3", "two answers") else expected[-1:]
        assert trained_texts(tokenizer, last) == only
        assert whole.trained.all() and whole.weights is None

    check_all(check)
