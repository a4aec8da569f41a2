"""What every client's script does: it asks a server each of its questions and writes down what came of them, as JSON."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Question = Callable[[str], Any]
WEATHER = "What is the weather in Oslo?"
CAPITAL = "What is the capital of France?"
TOO_LONG = "word " * 9000  # some times the context of the model


class Questions:
    """Functions of the server's address, each named as the test that reads its answer names it."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages
        self.asked: dict[str, Question] = {}

    def __call__(self, question: Question) -> Question:
        self.asked[question.__name__] = question
        return question

    def main(self) -> None:
        """`script URL FILE`: one entry for each question, and the packages' versions."""
        url, file = sys.argv[1:]
        answers: dict[str, Any] = {"versions": {"value": {name: version(name) for name in self.packages}}}
        for name, question in self.asked.items():
            try:
                answers[name] = {"value": question(url)}
            except Exception:
                answers[name] = {"error": traceback.format_exc()}
        Path(file).write_text(json.dumps(answers))
