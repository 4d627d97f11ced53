"""``python -m manyhands.infer FOLDER --prompt TEXT``: asks a trained model; without --prompt, a chat line by line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from manyhands.core.errors import EXIT_INTERRUPTED, UserError


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("manyhands generate", description="Ask a trained model. Answers are greedy.")
    parser.add_argument("folder", type=Path, help="a run's folder, a model folder, or an adapter folder")
    parser.add_argument("--prompt", help="one question; without it, each line of standard input is a turn of a chat")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer, in tokens (default 256)"
    )
    parser.add_argument("--base", help="base model of an adapter: a folder or a hub name (default: the one it names)")
    arguments = parser.parse_args(argv)
    if arguments.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    return arguments


def main(argv: list[str]) -> int:
    """Prints answers only; what a person should know goes to standard error."""
    arguments = parse_arguments(argv)
    try:
        from manyhands.infer.load import open_answerer

        answerer = open_answerer(arguments.folder, arguments.base)
        if arguments.prompt is not None:
            print(answerer.answer([{"role": "user", "content": arguments.prompt}], arguments.max_new_tokens))
            return 0
        if sys.stdin.isatty():
            print("Write a line; an empty line starts a new conversation, Ctrl-D ends.", file=sys.stderr)
        messages: list[dict[str, str]] = []
        for line in sys.stdin:
            text = line.rstrip("\n")
            if not text.strip():
                messages = []
                continue
            messages.append({"role": "user", "content": text})
            answer = answerer.answer(messages, arguments.max_new_tokens)
            messages.append({"role": "assistant", "content": answer})
            print(answer, flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
