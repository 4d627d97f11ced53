"""``manyhands data``: rows as the model will see them, with the trained tokens told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.run_file import Examples, Overrides, RunFile, load_run
from manyhands.cli.words import harmless, report_aside

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from manyhands.facts.types import DataFacts

TRAINED = ("⟦", "⟧")  # around trained tokens where there is no colour


def data(
    run: RunFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows shown.")] = 3,
    examples: Examples = None,
) -> None:
    """Preview the training rows, trained tokens marked.

    Counts and lengths come below them. Rows that a run would refuse are an error here too."""
    config = load_run(run, overrides, examples=examples)
    from rich.console import Console

    from manyhands.data.prepare import prepare
    from manyhands.data.store import TokenStore
    from manyhands.data.tokenizer import load_tokenizer
    from manyhands.facts.hub import locate_model

    model = config.model
    folder = locate_model(model.name, model.revision, False, trust_remote_code=model.trust_remote_code, report=report_aside)
    facts = prepare(config, folder, report_aside)
    store = TokenStore.open(facts.folder)
    tokenizer = load_tokenizer(folder, model.chat_template, model.trust_remote_code)
    console = Console(highlight=False)
    coloured = console.is_terminal and not console.no_color
    if rows:
        console.print("trained tokens are green" if coloured else f"trained tokens stand in {TRAINED[0]} {TRAINED[1]}")
    for index in range(min(rows, store.train.num_rows)):
        ids, trained = store.train.row(index)
        console.rule(f"row {index}: {len(ids)} tokens, {int(trained.sum())} trained", style="dim")
        console.print(mark_trained(tokenizer, ids, trained, coloured=coloured), soft_wrap=True)
    _print_counts(console, facts, store.train.lengths)


def mark_trained(tokenizer: Any, ids: np.ndarray, trained: np.ndarray, *, coloured: bool) -> Text:
    """Decodes ``ids (T)`` span by span; spans of ``trained (T)`` bool are green, or in brackets without colour."""
    from itertools import groupby

    from rich.text import Text

    text = Text()
    position = 0
    for is_trained, group in groupby(trained.tolist()):
        length = len(list(group))
        span = harmless(
            tokenizer.decode(ids[position : position + length].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        position += length
        if is_trained and not coloured:
            span = f"{TRAINED[0]}{span}{TRAINED[1]}"
        text.append(span, style="bold green" if is_trained and coloured else "")
    return text


def _print_counts(console: Console, facts: DataFacts, lengths: np.ndarray) -> None:
    from rich.table import Table

    counts = [
        ("training rows", f"{facts.num_rows:,}"),
        ("tokens", f"{facts.num_tokens:,}"),
        ("trained tokens", f"{facts.num_targets:,} ({facts.num_targets / max(1, facts.num_tokens):.0%})"),
        ("length in tokens", _quantiles(lengths)),
        ("validation rows", f"{facts.num_validation_rows:,} ({facts.num_validation_tokens:,} tokens)"),
    ]
    changes = (("truncated", facts.num_truncated), ("split", facts.num_split), ("left out", facts.num_dropped))
    counts += [(f"rows {name}", f"{count:,}") for name, count in changes if count]
    listing = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in counts:
        listing.add_row(name, value)
    console.rule(style="dim")
    console.print(listing)
    console.print(f"token cache: {facts.folder}", style="dim", soft_wrap=True)


def _quantiles(lengths: np.ndarray) -> str:
    import numpy as np

    if not len(lengths):
        return "no rows"
    low, median, high, top = (int(value) for value in np.quantile(lengths, (0.0, 0.5, 0.9, 1.0)))
    return f"shortest {low:,}, median {median:,}, 90 % up to {high:,}, longest {top:,}"
