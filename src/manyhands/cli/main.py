"""All commands, and the one place that handles errors: a ``UserError`` is printed, a bug keeps its traceback."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from manyhands import __version__
from manyhands.cli.config import config, import_file
from manyhands.cli.export import export, push
from manyhands.cli.infer import chat, evaluate, generate, serve
from manyhands.cli.init import init
from manyhands.cli.machine import doctor, gpu_info, memory_check, setup_accelerate
from manyhands.cli.one_line import rename_option
from manyhands.cli.option_hints import explain_usage
from manyhands.cli.process import bench
from manyhands.cli.prove import prove
from manyhands.cli.run_file import data, plan, tensorboard, train
from manyhands.cli.runs import app as runs
from manyhands.cli.runs import ui
from manyhands.cli.submit import submit
from manyhands.cli.sweep import sweep
from manyhands.core.errors import EXIT_INTERRUPTED, UserError, explain_foreign
from manyhands.core.files import explain_refused
from manyhands.core.text import print_safely


class _CommandGroup(TyperGroup):
    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _errors_as_lines(args):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_lines(ctx.args, ctx):
            return super().invoke(ctx)


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option of one value that is given twice: only the last would have an effect."""
        given = self.make_parser(ctx).parse_args(args=list(args))[2]
        for option in given:
            if given.count(option) > 1 and not (getattr(option, "multiple", True) or getattr(option, "is_flag", False)):
                name = max(option.opts, key=len)
                takes_lists = name == "--data" and any(param.name == "overrides" for param in self.params)
                fix = "write data.train=[a.jsonl,b.jsonl]" if takes_lists else "leave one of them out"
                raise UserError(f"{name} is given twice", where=f"manyhands {ctx.info_name}", fix=fix)
        return super().parse_args(ctx, args)


@contextlib.contextmanager
def _errors_as_lines(words: Sequence[str], ctx: Any = None) -> Iterator[None]:
    """Prints what the user can correct, the command line included, and ends with its exit code."""
    words = list(words)  # parsing empties it
    try:
        try:
            yield
        except Exception as error:
            if (usage := explain_usage(error, words, ctx)) is None:
                raise
            raise usage from None
        finally:
            sys.stdout.flush()  # a full disk behind it is met here, not when the interpreter ends
    except UserError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        if (refused := explain_refused(error, Path.cwd())) is None:
            raise
        print(refused, file=sys.stderr)
        raise typer.Exit(refused.exit_code) from None
    except (KeyboardInterrupt, typer.Abort):  # Abort: Ctrl-C or Ctrl-D at a prompt
        print("interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BaseException as error:
        if (foreign := explain_foreign(error)) is None:
            raise
        print(foreign, file=sys.stderr)
        raise typer.Exit(foreign.exit_code) from None


app = typer.Typer(
    cls=_CommandGroup,
    help=("Fine-tuning, planned before launch: `init` writes a run file, `plan` shows it, `train` runs it."),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help takes a third of the start-up time
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"manyhands {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for _name, _command in (
    ("train", train),
    ("plan", plan),
    ("sweep", sweep),
    ("submit", submit),
    ("data", data),
    ("generate", generate),
    ("chat", chat),
    ("serve", serve),
    ("eval", evaluate),
    ("export", export),
    ("push", push),
    ("init", init),
    ("import", import_file),
    ("config", config),
    ("prove", prove),
    ("bench", bench),
    ("doctor", doctor),
    ("gpu-info", gpu_info),
    ("memory-check", memory_check),
    ("tensorboard", tensorboard),
    ("ui", ui),
    ("setup-accelerate", setup_accelerate),
):
    app.command(_name, cls=_Command, context_settings={"token_normalize_func": rename_option})(_command)
app.add_typer(runs, name="runs")


def main() -> None:
    """The ``manyhands`` command and ``python -m manyhands``."""
    print_safely()
    app(prog_name="manyhands")
