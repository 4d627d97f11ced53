"""All facts of a run, read in the one process that plans: the model, the prepared rows, this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.config.schema import ModelSection, RunConfig
from manyhands.data.summary import PreparedData
from manyhands.facts.adapter import find_adapter
from manyhands.facts.host import free_disk_bytes, read_host_facts
from manyhands.facts.hub import locate_model
from manyhands.facts.identity import identify_files
from manyhands.facts.model import read_model_facts, resize_vocabulary
from manyhands.facts.packing import judge_packing
from manyhands.facts.types import DataFacts, Facts, NewTokens


def gather_facts(
    config: RunConfig,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    data: PreparedData | None = None,
    saves: bool = True,
    identify: bool = True,
    report: Callable[[str], Any] = print,
) -> Facts:
    """Find the model, read its dimensions, prepare the rows (cached), and look at the machine.

    ``world_size``: the number of processes where somebody else launched them, ``local_world_size`` of them on this
    machine.
    ``data``: the rows, where they are prepared already. ``saves``: whether checkpoints and a result are
    written, for which the disk must have room. ``identify``: hash the base model's files, which a run that can be
    resumed needs; that reads all of them once. ``report`` gets what takes time, as text.
    The model is judged before the data is touched, so that a wrong name costs nothing.
    """
    from manyhands.data.prepare import prepare

    needs_weights = config.model.init == "pretrained"
    folder = locate_model(
        config.model.name,
        config.model.revision,
        needs_weights,
        trust_remote_code=config.model.trust_remote_code,
        report=report,
    )
    model = judge_packing(config, read_model_facts(folder, config.model.name, config.model.init), report)
    if identify:
        model = model.model_copy(update={"files": identify_files(folder, config, report)})
    new_tokens = find_new_tokens(config.model, folder, model.vocab_size)
    adapter = find_adapter(config, report)
    data = prepare(config, folder, report) if data is None else data
    return Facts(
        model=resize_vocabulary(model, new_tokens),
        data=DataFacts(**vars(data)),
        host=read_host_facts(),
        new_tokens=new_tokens,
        adapter=adapter,
        free_disk_bytes=free_disk_bytes(Path(config.output.dir).expanduser() / config.name) if saves else None,
        world_size=world_size,
        local_world_size=local_world_size,
    )


def find_new_tokens(model: ModelSection, folder: Path, vocab_size: int) -> NewTokens | None:
    """Ids of ``model.new_tokens``, and the rows of embeddings they need; None where none are asked.

    The vocabulary is resized to exactly what is needed. Models with more rows than the tokenizer has tokens (padded to
    a multiple that is fast) keep their size as long as that is enough. Imports transformers.
    """
    if not model.new_tokens:
        return None
    from manyhands.data.tokenizer import load_tokenizer

    known = load_tokenizer(folder, trust_remote_code=model.trust_remote_code).get_vocab()
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code, new_tokens=model.new_tokens)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in model.new_tokens}
    return NewTokens(
        ids=tuple(ids.values()),
        fresh_ids=tuple(number for token, number in ids.items() if token not in known),
        vocab_size=max(vocab_size, 1 + max(ids.values())),
    )
