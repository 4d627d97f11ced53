"""The file of answers: written as they come, put in order at the end, continued after a kill. Knows no torch.

While answers are made they are lines of ``OUTPUT.partial``, in any order; its first line says what they are answers to
(``identity``). A line that a kill has cut is dropped, and its prompt answered again. The finished file appears by one
rename: each prompt's row with its answer, in the order of the prompts.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.files import sync
from manyhands.data.read.text_files import is_encodable

HEADER = b'{"identity": '  # how the partial file begins


class AnswerFile:
    """Answers of ``num_prompts`` prompts on their way to ``output``."""

    def __init__(self, output: Path, identity: Mapping[str, Any], num_prompts: int, *, overwrite: bool = False) -> None:
        """Opens or continues the partial file. UserError if ``output`` exists, is being written, or answers others."""
        if output.is_dir():
            raise UserError(
                "the file of answers is a folder", where=str(output), fix=f"name a file: {output / 'answers.jsonl'}"
            )
        if output.exists() and not overwrite:
            raise UserError(
                "the file of answers exists", where=str(output), fix="choose another --output, or add --overwrite"
            )
        self.output, self.partial = output, output.with_name(output.name + ".partial")
        self._lines: dict[int, bytes] = {}  # by prompt
        self._num_prompts = num_prompts
        self._header: dict[str, Any] = {"identity": dict(identity), "num_prompts": num_prompts}
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.partial.open("a+b")
        except OSError as error:
            raise UserError("the answers cannot be written", where=str(self.partial), why=str(error)) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(
                "another process is writing these answers", where=str(self.partial), fix="wait for it, or end it"
            ) from None
        try:
            self._continue()
        except BaseException:
            self._file.close()
            raise

    def _continue(self) -> None:
        """Reads what there is, up to the first line that is not whole."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file):
            if number == 0 and not (line.startswith(HEADER) or HEADER.startswith(line)):
                raise UserError(
                    "the file beside the answers holds something else",
                    where=str(self.partial),
                    why="answers so far are kept under this name",
                    fix=f"move {self.partial.name} away, or choose another --output",
                )
            value = _read_line(line)
            if number == 0 and value is not None:
                self._compare(value)
            elif value is not None and value.get("number") in range(self._num_prompts):
                self._lines[value["number"]] = line
            else:
                break
            end += len(line)
        self._file.truncate(end)
        if end == 0:
            self._write(self._header)

    def _compare(self, header: Mapping[str, Any]) -> None:
        now, before = self._header["identity"], header.get("identity")
        before = before if isinstance(before, dict) else {}
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if changed or header.get("num_prompts") != self._num_prompts:
            raise UserError(
                "the answers so far are to something else",
                where=str(self.partial),
                why=f"these differ: {', '.join(changed) or 'the number of prompts'}",
                fix=f"run the command that began it, delete {self.partial.name}, or choose another --output",
                details=[f"{key}: {_shorten(before.get(key))} -> {_shorten(now.get(key))}" for key in changed],
            )

    @property
    def answered(self) -> set[int]:
        """Numbers of the prompts that have their answer."""
        return set(self._lines)

    def add(self, number: int, answer: Mapping[str, Any]) -> None:
        """Adds the fields of an answer and hands them to the system: a kill does not lose it."""
        self._lines[number] = self._write({"number": number, **answer})

    def _write(self, value: Mapping[str, Any]) -> bytes:
        line = _write_line(value).encode()
        self._file.write(line)
        self._file.flush()
        return line

    def read(self, number: int) -> dict[str, Any]:
        """The fields of a prompt's answer."""
        answer = json.loads(self._lines[number])
        del answer["number"]
        return answer

    def finish(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes ``output`` in order; removes the partial file. A row's own answer field becomes ``reference``."""
        if missing := self._num_prompts - len(self._lines):
            raise ValueError(f"{missing} prompts have no answer yet")
        temporary = self.output.with_name(f".{self.output.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                for number, row in enumerate(rows):
                    fields = dict(row)
                    if "answer" in fields:
                        fields.setdefault("reference", fields.pop("answer"))
                    file.write(_write_line(fields | self.read(number)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.output)
        finally:
            temporary.unlink(missing_ok=True)
        sync(self.output.parent)
        self.partial.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        self._file.close()


def _write_line(value: Mapping[str, Any]) -> str:
    """A line of JSON. A row's other fields may hold half of a surrogate pair, which only an escape can write."""
    return json.dumps(value, ensure_ascii=not is_encodable(value)) + "\n"


def _read_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line that is whole; None for any other."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
