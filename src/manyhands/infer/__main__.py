"""``python -m manyhands.infer VERB JSON``: what ``manyhands generate``, ``chat``, ``serve`` and ``eval`` start.

The options of the commands (``cli/infer.py``) come as one JSON object, so that they are defined once. Answers and
figures go to standard output, what a person should know besides to standard error.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.core.errors import EXIT_INTERRUPTED, UserError, explain_foreign
from manyhands.core.files import explain_refused
from manyhands.core.text import print_safely, printable
from manyhands.infer.settings import GenerationSettings
from manyhands.launch.run.folder import describe_earlier_result

Fields = Mapping[str, Any]
NO_FIELDS: Fields = {}


def generate(
    folder: str,
    prompt: str | None = None,
    input: str | None = None,
    output: str | None = None,
    base: str | None = None,
    settings: Fields = NO_FIELDS,
    options: Fields = NO_FIELDS,
    placement: Fields = NO_FIELDS,
    overwrite: bool = False,
    images: Sequence[str] = (),
) -> int:
    from manyhands.infer.batch import answer_file, open_placed
    from manyhands.infer.prompts import PromptOptions, messages_of
    from manyhands.infer.replicas import Placement

    asked, added = GenerationSettings.from_json(settings), PromptOptions.from_json(options)
    if input is not None and output is not None:
        where = Placement(**placement)
        files = Path(folder), Path(input), Path(output)
        answer_file(*files, asked, base=base, options=added, placement=where, overwrite=overwrite)
        return 0
    answerer = open_placed(Path(folder), base)
    content = [*({"type": "image", "image": place} for place in images), {"type": "text", "text": prompt or ""}]
    row = {"messages": [{"role": "user", "content": content}]} if images else {"prompt": prompt or ""}
    messages, tools = messages_of(row, added, images=bool(images))
    print(printable(answerer.answer_all([messages], asked, tools)[0].text))
    return 0


def chat(folder: str, base: str | None = None, settings: Fields = NO_FIELDS, options: Fields = NO_FIELDS) -> int:
    from manyhands.infer.batch import open_placed
    from manyhands.infer.chat import chat as hold_chat
    from manyhands.infer.prompts import PromptOptions

    hold_chat(open_placed(Path(folder), base), GenerationSettings.from_json(settings), PromptOptions.from_json(options))
    return 0


def serve(folder: str, settings: Fields = NO_FIELDS, placement: Fields = NO_FIELDS, **chosen: Any) -> int:
    from manyhands.infer.replicas import Placement
    from manyhands.infer.serve import serve as serve_model

    asked = GenerationSettings.from_json(settings)
    return serve_model(Path(folder), settings=asked, placement=Placement(**placement), **chosen)


def evaluate(
    folder: str,
    data: str | None = None,
    settings: Fields = NO_FIELDS,
    placement: Fields = NO_FIELDS,
    output: str | None = None,
    as_json: bool = False,
    **chosen: Any,
) -> int:
    from manyhands.infer import compare
    from manyhands.infer.replicas import Placement

    asked, where = GenerationSettings.from_json(settings), Placement(**placement)
    found = compare.compare(Path(folder), data=data, settings=asked, placement=where, **chosen)
    is_run = (Path(folder) / "run.json").is_file()
    target = Path(output) if output is not None else compare.output_folder(Path(folder), data) if is_run else None
    try:
        for path in compare.write_files(found, target) if target is not None else ():
            print(f"written: {path}", file=sys.stderr)
    finally:  # a folder that cannot be written does not lose the figures
        print(json.dumps(compare.to_json(found)) if as_json else compare.describe(found), flush=True)
    return 0


def harness(folder: str, tasks: Sequence[str], output: str | None = None, as_json: bool = False, **chosen: Any) -> int:
    from manyhands.infer.harness import describe, run_tasks

    results = run_tasks(Path(folder), tasks, **chosen)
    try:
        if output is not None:
            Path(output).mkdir(parents=True, exist_ok=True)
            (Path(output) / "lm-eval.json").write_text(json.dumps(results, indent=2, default=str) + "\n")
    finally:
        print(json.dumps(results, default=str) if as_json else describe(results), flush=True)
    return 0


VERBS = {verb.__name__: verb for verb in (generate, chat, serve, evaluate, harness)}


def main(argv: list[str]) -> int:
    from manyhands.data.read.messages import RowRefused

    verb, text = argv
    try:
        request = json.loads(text)
        if note := describe_earlier_result(Path(request["folder"])):
            print(printable(note), file=sys.stderr)
        return VERBS[verb](**request)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:
        if isinstance(error, RowRefused):
            shown: UserError | None = UserError(str(error))
        elif isinstance(error, UserError):
            shown = error
        else:
            shown = explain_refused(error, Path.cwd()) if isinstance(error, OSError) else explain_foreign(error)
        if shown is None:
            raise
        print(shown, file=sys.stderr)
        return shown.exit_code


if __name__ == "__main__":
    print_safely()
    sys.exit(main(sys.argv[1:]))
