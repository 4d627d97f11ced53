"""Writes small data for the recipes to data/: `python examples/recipes/make_data.py [FOLDER]`. Made of texts of this
repository; to be replaced by data of your own.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read_conversations() -> list[dict]:
    """The 300 conversations of the demo: a question, an answer in a sentence and a line `In short: ...`."""
    lines = (ROOT / "src" / "manyhands" / "demo" / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_documents() -> list[str]:
    """Pages of the documentation, the longest left out."""
    texts = (path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    return [text for text in texts if len(text) < 20_000]


def turns(row: dict) -> tuple[str, str]:
    """Question and answer."""
    return row["messages"][-2]["content"], row["messages"][-1]["content"]


def tag(row: dict) -> dict:
    """The same with the last line of the answer between new tokens."""
    question, answer = turns(row)
    text, _, short = answer.rpartition("In short: ")
    return {"prompt": question, "completion": f"{text}<short>{short}</short>"}


def make_pair(row: dict, other: dict) -> dict:
    """An answer to a question, and one to another question."""
    question, answer = turns(row)
    return {"prompt": question, "chosen": answer, "rejected": turns(other)[1]}


def main(folder: Path) -> None:
    conversations, documents = read_conversations(), read_documents()
    data = {
        "chat.jsonl": conversations[:260],
        "test.jsonl": conversations[260:],
        "tags.jsonl": [tag(row) for row in conversations],
        "pairs.jsonl": [
            make_pair(row, other) for row, other in pairwise(conversations) if turns(row)[1] != turns(other)[1]
        ],
        "text.jsonl": [{"text": text} for text in documents],
        "long.jsonl": [
            {"prompt": f"What is the title of this page?\n\n{text}", "completion": text.splitlines()[0].strip("# ")}
            for text in documents
        ],
        "questions.jsonl": [{"prompt": turns(row)[0]} for row in conversations[260:]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in data.items():
        (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
