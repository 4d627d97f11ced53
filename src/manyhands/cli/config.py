"""``manyhands config``: the keys of a run file, explained; ``manyhands import``: another tool's file as one of ours."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.core.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from manyhands.importers.translation import Translation

WIDE = 110  # width of a terminal for all four columns of the table


def config(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="A key or section, such as batch.samples.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
) -> None:
    """Explain a key of the run file, or list all keys."""
    from manyhands.config.keys import explain, json_schema, sections

    if schema:
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


def import_file(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File of another tool: Axolotl, LLaMA-Factory, TRL, ...")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Run file to write; it must not exist.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs to multiply per-GPU batches by (default: this machine's).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what becomes of each key and the run file as JSON.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse keys that are only substituted.")] = False,
) -> None:
    """Translate another tool's file into a run file. Lists what becomes of every key.

    Without --output the run file is printed, and the list on standard error. Exit code 1 if a key is refused."""
    from manyhands.importers.report import as_json as plain
    from manyhands.importers.report import describe, native_yaml

    if output is not None and output.exists():
        raise UserError("the file already exists", where=str(output), fix="choose another name for --output")
    if output is not None and not output.parent.is_dir():
        raise UserError("there is no such folder", where=str(output.parent), fix="create it, or choose another one")
    translation = _translate(file, gpus, strict)
    if as_json:
        print(json.dumps(plain(translation), indent=2, ensure_ascii=False, default=str))
    else:
        print(describe(translation), file=sys.stdout if output else sys.stderr)
    if translation.findings():
        print(f"\n{file} cannot be run as it is: change what is refused above", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED)
    if output is not None:
        from manyhands.core.files import write_atomically

        write_atomically(output, native_yaml(translation))
        print(f"\nwrote {output}: `manyhands plan {output}` shows what it would do")
    elif not as_json:
        print(native_yaml(translation), end="")


def _translate(file: Path, gpus: int | None, strict: bool) -> Translation:
    from manyhands.config.read import read_run_file
    from manyhands.importers.load import config_from_mapping, resolve_paths
    from manyhands.importers.recognize import recognize, refuse_settings, translate
    from manyhands.importers.translation import clean_name
    from manyhands.launch.run.file import probe_host

    source = read_run_file(file)
    importer = recognize(source.mapping)
    if importer is None:
        refuse_settings(source)
        raise UserError(
            "this is already a run file of manyhands, or its format is unknown",
            where=str(file),
            fix=f"`manyhands plan {file}` checks it",
        )
    context = replace(probe_host(strict=strict), folder=file.absolute().parent, gpus=gpus)
    translation = translate(source, importer, context)
    translation.mapping.setdefault("name", clean_name(file.stem))
    resolve_paths(translation.mapping, context.folder)
    if not translation.findings():
        config_from_mapping(translation.mapping, where=str(file), origins=translation.origins)
    return translation
