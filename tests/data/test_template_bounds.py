"""A chat template is a program from outside: what it may cost is bounded, whatever it does."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.data.chat import template as template_module
from manyhands.data.chat.template import ChatTemplate, probe_in_subprocess
from manyhands.data.read.messages import RowRefused
from manyhands.data.tokenize.prepare import prepare
from manyhands.importers.load import config_from_mapping
from tests.support.tiny import CHATML, tiny_tokenizer

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "loops": LOOPS,
    "one text": "{{ ('x' * 5000000000) | length }}",
    "doubled text": "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
    "{{ n.t | length }}",
    "a long text": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "format": "{{ '%5000000000d' | format(1) }}",
    "power": "{{ 9 ** (9 ** 9) > 1 }}",
}
HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
BOMB = [{"role": "user", "content": "bomb"}, {"role": "assistant", "content": "Hello"}]


def tokenizer_with(template: str):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_without_bounds_is_refused_before_any_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "TRIAL_CPU_S", 1)
    tokenizer = tokenizer_with(BOMBS[name] + CHATML)
    with pytest.raises(UserError, match="takes too long, or too much memory") as refused:
        probe_in_subprocess(partial(tokenizer.apply_chat_template, tokenize=False))
    assert "model.chat_template" in refused.value.fix


def test_a_run_with_such_a_template_ends_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "TRIAL_CPU_S", 1)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": HELLO}) + "\n")
    data = {"train": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache"), "validation_fraction": 0.0}
    model = {"name": str(tmp_path / "model"), "chat_template": LOOPS + CHATML}
    config = config_from_mapping({"name": "run", "model": model, "data": data})
    with pytest.raises(UserError, match="takes too long") as refused:
        prepare(config, tmp_path / "model", lambda _: None)
    assert "more than 1 s" in refused.value.why


@pytest.mark.parametrize(
    "template",
    [CHATML, "{{ raise_exception('no') }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 1 / 0 }}"],
)
def test_what_ends_is_left_to_the_rows(template: str) -> None:
    tokenizer = tokenizer_with(template)
    probe_in_subprocess(partial(tokenizer.apply_chat_template, tokenize=False))
    if template != CHATML:
        with pytest.raises(RowRefused):
            ChatTemplate(tokenizer, {}).render(HELLO)


def test_a_row_that_sets_it_off_ends_the_run_and_others_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "RENDER_CPU_S", 0.3)
    monkeypatch.setattr(template_module, "CPU_S_A_CONVERSATION", 0.0)
    tokenizer = tokenizer_with("{% if messages[0].content == 'bomb' %}" + LOOPS + "{% endif %}" + CHATML)
    template = ChatTemplate(tokenizer, {})
    probe_in_subprocess(partial(tokenizer.apply_chat_template, tokenize=False))
    for render in (template.render, template.try_render, lambda bomb: template.render_many([HELLO, bomb])):
        with pytest.raises(UserError, match="takes too long"):
            render(BOMB)
        assert template.render(HELLO).startswith("<|im_start|>user\nHello")


def test_the_time_of_other_threads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread burns ten times the limit while a conversation that waits for it is rendered."""
    monkeypatch.setattr(template_module, "RENDER_CPU_S", 0.1)
    done = threading.Event()

    def burn() -> None:
        sum(index * index for index in range(10_000_000))
        done.set()

    thread = threading.Thread(target=burn)
    with template_module.limit_cpu():
        thread.start()
        while not done.wait(0.005):
            pass
    thread.join()
