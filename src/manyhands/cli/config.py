"""``manyhands config``: the keys of a run file, explained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.core.errors import UserError

WIDE = 110  # width of a terminal for all four columns of the table


def config(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="A key or section, such as batch.samples.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
) -> None:
    """Explain a key of the run file, or list all keys."""
    from manyhands.config.keys import explain, json_schema, sections

    if schema:
        import json

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    elif key and key not in sections() and Path(key).exists():
        raise UserError(
            "this is a file or folder, not a key", where=key, fix=f"`manyhands plan {key}` checks a run file's keys"
        )
    elif key:
        try:
            print(explain(key))
        except KeyError:
            from manyhands.importers.hints import hint

            fix = hint(key).removeprefix(": ").removeprefix("; ")
            raise UserError(f"there is no key `{key}`", where="manyhands config", fix=fix) from None
    else:
        _print_all_keys()


def _print_all_keys() -> None:
    from rich.table import Table
    from rich.text import Text

    from manyhands.config.keys import all_keys, default_text, sections, table
    from manyhands.core.text import open_console

    console = open_console()
    listing = Table(box=None, padding=(0, 2, 0, 0))
    wide = console.width >= WIDE  # `manyhands config KEY` always shows what is allowed
    for title in ("key", "default", *(["allowed"] if wide else []), "meaning"):
        listing.add_column(title, overflow="fold", no_wrap=title == "key", ratio=2 if title == "meaning" else None)
    section = ""
    for path in all_keys():
        if "." in path and path.split(".")[0] != section:
            section = path.split(".")[0]
            listing.add_row(Text(""))
            blank = [""] * (2 if wide else 1)
            listing.add_row(Text(section, style="bold"), *blank, Text(sections()[section].__doc__ or "", style="bold"))
        entry = table()[path]
        allowed = [entry.allowed.replace("`", "")] if wide else []
        listing.add_row(*(Text(text) for text in (path, default_text(path), *allowed, entry.sentence)))
    console.print(listing)
