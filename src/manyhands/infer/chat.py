"""``manyhands chat``: chat in the terminal, answers streamed."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from manyhands.core.errors import UserError
from manyhands.core.text import printable
from manyhands.data.read.messages import RowRefused
from manyhands.infer.load import Answerer
from manyhands.infer.prompts import NOTHING_ADDED, PromptOptions
from manyhands.infer.settings import GenerationSettings

HELP = (
    "An empty line starts a new conversation, /image PATH shows an image to the next turn and /image alone drops those "
    "that wait, Ctrl-C ends an answer, Ctrl-D ends the chat."
)
IMAGE = "/image"


def chat(
    answerer: Answerer,
    settings: GenerationSettings,
    options: PromptOptions = NOTHING_ADDED,
    lines: Iterable[str] | None = None,
    out: TextIO | None = None,
) -> None:
    """Each line is a turn; the model sees those before it. Images of a turn that was refused wait for the next one.
    ``lines`` and ``out``: standard input and output.

    The prompt sign and help are for terminals only, so that a pipe gets answers alone, one after the other.
    """
    on_terminal = lines is None and sys.stdin.isatty()
    out = out or sys.stdout
    if on_terminal:
        print(HELP, file=sys.stderr)
    messages = _begin(options)
    images: list[dict[str, str]] = []  # of the next turn
    for line in lines if lines is not None else _read_lines(on_terminal):
        text = line.rstrip("\n")
        if not text.strip():
            messages = _begin(options)
            continue
        if not answerer.tokenizer.chat_template:  # a model that continues text has no turns
            messages = []
        if text.split()[0] == IMAGE:
            path = text.strip().removeprefix(IMAGE).strip()
            images = [*images, {"type": "image", "image": path}] if path else []
            continue
        said = {"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}
        messages.append(said)
        try:
            answer = _answer(answerer, messages, settings, options, out)
        except (RowRefused, UserError) as error:
            print(error if isinstance(error, UserError) else UserError(str(error)), file=sys.stderr)
            messages.pop()
            if images:
                wait, them = ("image waits", "it") if len(images) == 1 else ("images wait", "them")
                print(f"  {len(images)} {wait} for the next turn; {IMAGE} alone drops {them}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})
        images = []


def _begin(options: PromptOptions) -> list[dict[str, Any]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _read_lines(on_terminal: bool) -> Iterable[str]:
    while True:
        if on_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def _answer(
    answerer: Answerer,
    messages: list[dict[str, Any]],
    settings: GenerationSettings,
    options: PromptOptions,
    out: TextIO,
) -> str:
    """Prints the answer while it is made; what was said before Ctrl-C counts as the answer."""
    shown: list[str] = []

    def show(_: int, text: str) -> None:
        shown.append(text)
        print(printable(text), end="", file=out, flush=True)

    try:
        return answerer.answer_all([messages], settings, list(options.tools), show, shorten=True)[0].text
    except KeyboardInterrupt:
        if not shown:
            raise
        return "".join(shown)
    finally:
        print(file=out, flush=True)
