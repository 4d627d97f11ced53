"""SmolLM2-135M-Instruct: its tokenizer names ``<|im_start|>`` as end of sequence, so the end must come from
elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manyhands.infer.load import open_answerer

FOLDER = os.environ.get("MANYHANDS_SMOLLM2", "")


@pytest.mark.ci
@pytest.mark.real
@pytest.mark.skipif(not FOLDER, reason="MANYHANDS_SMOLLM2 does not name the model's folder")
def test_it_answers_and_stops() -> None:
    answerer = open_answerer(Path(FOLDER))
    assert answerer.end_ids == {2}  # <|im_end|>
    answer = answerer.answer(
        [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}], 40
    )
    assert "Paris" in answer
    assert "<|im" not in answer
