"""Effects of the keys that say what a chat template is given, and which of its tokens are trained."""

from __future__ import annotations

from manyhands.data.store.store import TokenStore
from manyhands.infer.load import find_parts
from tests.keys.lab import Lab
from tests.keys.rows import facts_of

MARKED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def train_on(lab: Lab) -> None:
    turns = [("user", "alpha"), ("assistant", "beta"), ("user", "gamma"), ("assistant", "delta eta")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}] * 4
    path = lab.write_rows("turns.jsonl", rows)

    def count(asked: str) -> tuple[int, int]:
        facts = facts_of(lab, data__train=path, data__train_on=asked, data__validation_fraction=0.0)
        store = TokenStore.open(facts.folder)
        return int(store.train.num_loss_tokens[0]), int(store.train.lengths[0])

    (answers, length), (last, _), (everything, _) = count("assistant"), count("last"), count("all")
    assert 0 < last < answers < everything == length - 1  # every token but the first


def chat_template_kwargs(lab: Lab) -> None:
    template = "note: {{ note }}\n" + MARKED + HEADER
    ran = lab.export(
        {"model.chat_template": template, "data.chat_template_kwargs": {"note": "theta"}, "stop.max_steps": 1}
    )
    assert ran.prompt_of(0).startswith("note: theta\n")
    assert find_parts(ran.folder).chat_template_kwargs["note"] == "theta"  # so generation asks in the same words


def date(lab: Lab) -> None:
    template = "{{ strftime_now('%d.%m.%Y') }} {{ date_string }}\n" + MARKED + HEADER
    ran = lab.export({"model.chat_template": template, "data.date": "2031-02-03", "stop.max_steps": 1})
    assert ran.prompt_of(0).startswith("03.02.2031 03 Feb 2031\n")
    assert find_parts(ran.folder).chat_template_kwargs["strftime_now"]("%Y") == "2031"
