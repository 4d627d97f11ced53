"""A small byte-level tokenizer with the special tokens of every template fixture; made here, nothing is downloaded."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.config.schema import RunConfig
from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.prepare import prepare
from manyhands.data.tokenize.summary import PreparedData
from tests.support.zygote import forking

from .families import TEMPLATES, train_tokenizer

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
]  # fmt: skip


def make_tokenizer(template: str | None = None, trim_offsets: bool = True, adds_bos: bool = False) -> Any:
    words = "Hello there, how are you? Fine. user assistant system model 42 43 Bye Hi   \n\n Be kind."
    tokenizer = train_tokenizer(SPECIAL, words, 400, "<s>", "</s>", trim_offsets=trim_offsets, adds_bos=adds_bos)
    tokenizer.add_tokens(["<think>", "</think>"])
    if template is not None:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a tokenizer with the ChatML template, and nothing else."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer("chatml").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    folder = tmp_path_factory.mktemp("plain")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def write_rows(tmp_path: Path):
    def write(rows: list[Any], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_config(tmp_path: Path):
    def make(
        train: Path, task: str = "sft", batch: dict | None = None, model: dict | None = None, seed: int = 0, **data: Any
    ) -> RunConfig:
        data = {"train": str(train), "cache": str(tmp_path / "cache"), **data}
        sections = {"model": {"name": "m", **(model or {})}, "data": data, "batch": batch or {}}
        return RunConfig.model_validate({"name": "t", "task": task, "seed": seed, **sections})

    return make


def run(config: RunConfig, folder: Path) -> tuple[PreparedData, TokenStore, list[str]]:
    """What a preparation gives, its store, and what it reports."""
    lines: list[str] = []
    facts = prepare(config, folder, lines.append)
    return facts, TokenStore.open(facts.folder), lines


@pytest.fixture
def forked() -> Iterator[None]:
    """Processes that tokenize start without importing anything: see ``tests/support/zygote.py``."""
    importlib.import_module("transformers.models.auto.tokenization_auto")  # sets variables that are read early
    with forking():
        yield
