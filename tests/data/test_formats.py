"""Rows become the conversation that was meant, whatever their fields are called; what cannot be trained says why."""

from __future__ import annotations

import json
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.config.sources import REQUIRED
from manyhands.core.errors import UserError
from manyhands.data.read.files import Row
from manyhands.data.read.formats import (
    Conversation,
    RowRefused,
    detect_format,
    row_weight,
    settle_format,
    to_conversation,
)
from manyhands.data.read.messages import check_messages

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "1"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def row(**fields: object) -> Row:
    return Row(fields, "f.jsonl", 7)


@pytest.mark.parametrize("format", REQUIRED)
def test_formats_are_detected(format: str) -> None:
    assert detect_format([row(id=1, **dict.fromkeys(REQUIRED[format], "x"))] * 3) == format


@pytest.mark.parametrize("format", REQUIRED)
def test_formats_are_detected_by_other_names(format: str) -> None:
    fields = {name: f"my_{name}" for name in REQUIRED[format]}
    assert detect_format([row(**dict.fromkeys(fields.values(), "x"))], fields) == format


def test_a_null_is_no_other_format() -> None:
    rows = [row(question="a", answer="b"), row(question="a", answer=None)]
    assert detect_format(rows) == "question" and detect_format(rows[1:]) == "question"
    with pytest.raises(RowRefused, match=r"^answer is null$"):
        to_conversation(rows[1], "question")
    either = row(question=None, answer=None, text="x")  # columns of several formats, as Parquet has them
    assert detect_format([either]) == "text"


def test_the_task_decides_between_text_and_a_conversation() -> None:
    rows = [row(instruction="a", output="b", text="whole")]
    assert detect_format(rows, task="sft") == "alpaca" and detect_format(rows, task="cpt") == "text"
    with pytest.raises(UserError, match="several formats: alpaca, text"):
        detect_format(rows, task="mixed")


def test_format_errors_list_fields_and_formats() -> None:
    with pytest.raises(UserError, match="format of the rows is not known") as none:
        detect_format([row(head="a", tail="b")])
    assert "f.jsonl:7" in str(none.value) and "head, tail" in str(none.value) and "question, answer" in str(none.value)
    with pytest.raises(UserError, match=r"several formats: messages, text") as both:
        detect_format([row(messages=[], text="a")])
    assert "data.format" in str(both.value)
    with pytest.raises(UserError, match="other fields than the rows before it"):
        detect_format([row(text="a"), row(question="a", answer="b")])
    with pytest.raises(UserError, match="no format has all the fields prompt, answer"):
        detect_format([row(text="a")], {"prompt": "p", "answer": "a"})
    with pytest.raises(UserError, match="no row has the field sytem"):
        settle_format([row(prompt="a", completion="b")], "prompt", {"system": "sytem"})


CONVERSIONS = [
    ("question", {"question": "a", "answer": "b"}, [USER, ANSWER]),
    ("prompt", {"prompt": "a", "completion": "b", "system": "s"}, [SYSTEM, USER, ANSWER]),
    ("prompt", {"prompt": [SYSTEM, USER], "completion": "b"}, [SYSTEM, USER, ANSWER]),
    ("messages", {"messages": [USER, ANSWER], "id": 3}, [USER, ANSWER]),
    ("messages", {"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
    ("messages", {"messages": [USER, ANSWER | {"tool_calls": None, "name": None}]}, [USER, ANSWER]),
    ("messages", {"messages": [USER | {"content": [{"type": "text", "text": "a"}, {"text": "c"}]}, ANSWER]},
     [USER | {"content": "ac"}, ANSWER]),
    ("messages", {"messages": [USER | {"content": [{"type": "text", "value": "a"}], "loss_weight": 0.0},
                               ANSWER | {"content": [{"type": "text", "value": "b"}], "loss_weight": 0.5}]},
     [USER | {"weight": 0.0}, ANSWER | {"weight": 0.5}]),
    ("messages", {"messages": [USER, {"role": "assistant", "content": [{"type": "reasoning", "value": "hm"},
                               {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]}]},
     [USER, {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}]),
    ("messages", {"messages": [{"role": "developer", "content": "d"}, ANSWER]},
     [{"role": "developer", "content": "d"}, ANSWER]),
    ("messages", {"messages": [USER, ANSWER | {"reasoning_content": "hm", "train": False}]},
     [USER, ANSWER | {"reasoning_content": "hm", "train": False}]),
    ("messages", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"id": "1"}]}, RESULT]},
     [USER, {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "1"}]}, RESULT]),
    ("messages", {"messages": [USER, ANSWER | {"tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]}]},
     [USER, ANSWER | {"tool_calls": [CALL]}]),
    ("messages", {"messages": [USER, {"role": "assistant", "content": None,
                                      "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                               {"role": "function", "name": "f", "content": "2"}, ANSWER]},
     [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
      {"role": "tool", "name": "f", "content": "2"}, ANSWER]),
    ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}],
                  "system": "s"},
     [SYSTEM, USER, ANSWER | {"weight": 0.0}]),
    ("sharegpt", {"conversations": [{"from": "system", "value": "s"}, USER, ANSWER], "system": ""},
     [SYSTEM, USER, ANSWER]),
    ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                                    {"from": "observation", "value": "2"}]},
     [USER, ANSWER | {"tool_calls": [CALL]}, {"role": "tool", "content": "2"}]),
    ("query", {"query": "a", "response": "b", "history": [["c", "d"]], "system": "s"},
     [SYSTEM, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, USER, ANSWER]),
    ("query", {"query": "a", "response": "b", "history": '[["c", "d"]]'},
     [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, USER, ANSWER]),
    ("messages", {"messages": [{"role": "Human", "content": "a"}, {"role": "gpt", "content": "b"},
                               {"role": "user", "content": "a"}, {"role": "model", "content": "b"}]},
     [USER, ANSWER, USER, ANSWER]),
    ("messages", {"messages": [USER, {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
                               {"role": "tool_call", "content": {"name": "f", "arguments": {"x": 1}}},
                               {"role": "tool_response", "content": "2"}, ANSWER]},
     [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "2"},
      ANSWER]),
    ("alpaca", {"instruction": "a", "input": "", "output": "b", "text": "..."}, [USER, ANSWER]),
    ("alpaca", {"instruction": "a", "input": "more", "output": "b", "system": "s", "history": [["c", "d"]]},
     [SYSTEM, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
      USER | {"content": "a\nmore", "instruction": "a", "input": "more"}, ANSWER]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "fields", "messages"), CONVERSIONS)
def test_rows_become_conversations(format: str, fields: dict, messages: list) -> None:
    before = json.dumps(fields)
    meant = Conversation(messages, num_prompt=len(messages) - 1 if format == "prompt" else 0)
    assert to_conversation(row(**fields), format) == meant
    assert json.dumps(fields) == before
    renamed = {name: f"my_{name}" for name in REQUIRED[format]}
    moved = {renamed.get(name, name): value for name, value in fields.items()}
    assert to_conversation(row(**moved), format, renamed) == meant


def test_system_prompts_can_be_dropped() -> None:
    for fields, format in (
        ({"messages": [SYSTEM, USER, ANSWER]}, "messages"),
        ({"conversations": [SYSTEM, USER, ANSWER]}, "sharegpt"),
        ({"prompt": "a", "completion": "b", "system": "s"}, "prompt"),
    ):
        meant = Conversation([USER, ANSWER], num_prompt=int(format == "prompt"))
        assert to_conversation(row(**fields), format, drop_system=True) == meant


def test_images_of_a_dropped_system_prompt_go_with_it() -> None:
    shown = {"role": "system", "content": [{"type": "image", "path": "a"}, {"type": "text", "text": "s"}]}
    marked = {"role": "system", "content": "<image>s"}
    asked = {"role": "user", "content": [{"type": "image", "path": "b"}, {"type": "text", "text": "?"}]}
    for fields in (
        {"messages": [shown, asked, ANSWER]},
        {"messages": [marked, {"role": "user", "content": "<image>?"}, ANSWER], "images": ["a", "b"]},
    ):
        found = to_conversation(row(**fields), "messages", drop_system=True, images=True)
        assert isinstance(found, Conversation) and [ref.place for ref in found.images] == ["b"]
        assert [message["role"] for message in found.messages] == ["user", "assistant"]


@pytest.mark.parametrize("value", [{"x": 1, "y": None}, '{"x": 1}'])
def test_a_row_may_have_template_arguments_of_its_own(value: object) -> None:
    talk = {"messages": [USER, ANSWER], "chat_template_kwargs": value}
    assert to_conversation(row(**talk), "messages") == Conversation([USER, ANSWER], arguments={"x": 1})
    with pytest.raises(RowRefused, match="must be a mapping"):
        to_conversation(row(**talk | {"chat_template_kwargs": [1]}), "messages")


def test_turns_with_other_keys() -> None:
    fields = {"messages": "log", "role": "speaker", "content": "words"}
    talk = [{"speaker": "user", "words": "a"}, {"speaker": "assistant", "words": "b"}]
    assert to_conversation(row(log=talk), "messages", fields) == Conversation([USER, ANSWER])
    turns = [{"who": "human", "said": "a"}, {"who": "gpt", "said": "b"}]
    assert to_conversation(row(conversations=turns), "sharegpt", {"from": "who", "value": "said"}) == Conversation(
        [USER, ANSWER]
    )


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]]])
def test_tools_as_a_list_or_text(tools: object) -> None:
    for format, talk in (("messages", {"messages": [USER, ANSWER]}), ("sharegpt", {"conversations": [USER, ANSWER]})):
        assert to_conversation(row(**talk, tools=tools), format) == Conversation([USER, ANSWER], [TOOL])
    assert to_conversation(row(messages=[USER, ANSWER], tools=""), "messages") == Conversation([USER, ANSWER], None)


def test_a_row_may_have_a_weight() -> None:
    assert to_conversation(row(question="a", answer="b", weight=2), "question") == Conversation(
        [USER, ANSWER], None, 2.0
    )
    assert to_conversation(row(question="a", answer="b", w="0.5"), "question", {"weight": "w"}) == Conversation(
        [USER, ANSWER], None, 0.5
    )
    assert row_weight(row(text="a", weight=0.25)) == 0.25 and row_weight(row(text="a")) == 1.0
    assert row_weight(row(text="a", weight="")) == 1.0, "an empty cell of a CSV file, as of the other optional fields"
    for wrong in (0, -1, True, "x", float("nan"), float("inf"), [1], 10**400):
        with pytest.raises(RowRefused, match="weight"):
            to_conversation(row(question="a", answer="b", weight=wrong), "question")


def test_a_text_is_itself() -> None:
    assert to_conversation(row(text=" a\n"), "text") == " a\n"
    assert to_conversation(row(body="a"), "text", {"text": "body"}) == "a"
    with pytest.raises(RowRefused, match="weight must be a number"):
        to_conversation(row(text="a", weight="much"), "text")


def messages(*talk: object) -> dict:
    return {"messages": list(talk)}


@pytest.mark.parametrize(
    ("format", "fields", "reason"),
    [
        ("messages", {"messages": []}, "at least one"),
        ("messages", {"messages": "hi"}, "messages is no JSON"),
        ("messages", {"messages": {}}, "list of messages"),
        ("messages", messages("hi"), "message 1 of messages is not an object"),
        ("messages", messages(USER), "no assistant message"),
        ("messages", messages(USER | {"role": "alien"}),
         "'alien'; known roles: system, developer, user, assistant, tool"),
        ("messages", messages({"from": "human", "value": "a"}), "sharegpt"),
        ("messages", messages(ANSWER | {"content": None}), "must be a string, this is NoneType"),
        ("messages", messages(ANSWER | {"content": [{"type": "image", "image": 1}]}), "trains text alone"),
        ("messages", messages(USER | {"tool_calls": [CALL]}, ANSWER), "only an assistant has them"),
        ("messages", messages(USER | {"thinking": "x"}, ANSWER), "only an assistant has them"),
        ("messages", messages(ANSWER | {"reasoning_content": 3}), "must be a string, this is int"),
        ("messages", messages(ANSWER | {"tool_calls": [{}]}),
         "tool call 1 of message 1 of messages must be an object with name"),
        ("messages", messages(ANSWER | {"tool_calls": [{"name": "f", "arguments": "{x"}]}), "is no JSON"),
        ("messages", messages(ANSWER | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}),
         "must be an object or JSON text"),
        ("messages", messages(ANSWER | {"tool_calls": [{"name": "f", "arguments": '{"a": {"b": 1, "b": 2}}'}]}),
         "the key 'b' stands twice"),
        *(
            (
                "messages",
                messages(ANSWER | {"tool_calls": [{"name": "f", "arguments": given}]}),
                f"holds {shown}, which",
            )
            for given, shown in (
                ({"x": [{"y": float("nan")}]}, "nan"),
                ('{"x": NaN}', "nan"),
                ('{"x": -Infinity}', "-inf"),
                ('{"x": 1e999}', "inf"),
                ({"x": date(2026, 1, 2)}, "datetime.date(2026, 1, 2)"),
            )
        ),
        ("messages", messages(ANSWER) | {"tools": [{"name": "f", "default": float("inf")}]}, "tools holds inf, which"),
        ("messages", messages(ANSWER) | {"chat_template_kwargs": '{"x": NaN}'}, "chat_template_kwargs holds nan"),
        ("messages", messages(ANSWER | {"weight": -1}), "weight of message 1 of messages must be a number >= 0"),
        ("messages", messages(ANSWER | {"train": "yes"}), "must be true or false"),
        ("messages", messages(ANSWER | {"train": True, "weight": 1}), "both weight and train"),
        ("messages", messages(ANSWER) | {"tools": [{}]}, "tool 1 of tools must be an object with a name"),
        ("messages", messages(ANSWER) | {"tools": "no"}, "tools is no JSON"),
        ("messages", {"messages": '[{"role": "assistant", "content": "\\ud800"}]'}, "surrogate"),
        ("sharegpt", {"conversations": [{"from": "alien", "value": "a"}]},
         "turn 1 of conversations has the role 'alien'; known roles: system"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": None}]}, "must be a string"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "f(1)"}]},
         "turn 1 of conversations is no JSON"),
        ("sharegpt", {"conversations": [SYSTEM, ANSWER], "system": "x"}, "two system prompts"),
        ("alpaca", {"instruction": "a", "output": ""}, "output is empty"),
        ("alpaca", {"instruction": "a", "input": 3, "output": "b"}, "input must be a string"),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["c"]]}, "list of pairs"),
        ("messages", messages(ANSWER | {"content": [{"type": "text", "txt": "a"}]}), "(type, txt) is text or value"),
        ("messages", messages(USER | {"content": [{"type": "reasoning", "value": "a"}]}, ANSWER),
         "only an assistant has them"),
        ("messages", messages(USER | {"images": ["a.png"]}, ANSWER), "message 1 of messages has images, and only text"),
        ("messages", messages(USER, ANSWER | {"weight": 1, "loss_weight": 1}), "both weight and loss_weight"),
        ("messages", messages(USER, ANSWER | {"tool_calls": [CALL], "function_call": CALL["function"]}), "keep one"),
        ("question", {"question": "a"}, "no field answer (fields found: question)"),
        ("question", {"question": "a", "answer": None}, "answer is null"),
        ("alpaca", {"instruction": None, "output": None}, "instruction and output are null"),
        ("question", {"question": "a", "answer": 3}, "answer must be a string, this is int"),
        ("question", {"question": "a", "answer": " "}, "answer is empty"),
        ("text", {"text": ""}, "text is empty"),
    ],
)  # fmt: skip
def test_rows_are_refused_with_the_reason(format: str, fields: dict, reason: str) -> None:
    with pytest.raises(RowRefused) as caught:
        to_conversation(row(**fields), format)
    assert reason in str(caught.value)


@given(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "from"]),
        st.sampled_from([None, "user", "function", "Hi", 1, ["user"]]),
    )
)
def test_messages_of_role_and_content_alone_are_checked_as_all_others_are(message: dict[str, object]) -> None:
    def check(given: dict[str, object]) -> object:
        try:
            return check_messages([given], "messages", {})
        except RowRefused as refused:
            return str(refused)

    expected = check({**message, "key": "value"})
    if not isinstance(expected, str):
        expected = [{key: value for key, value in expected[0].items() if key != "key"}]
    assert check(message) == expected
