"""Whether an input file is a batch: one pass over its lines, in bounded memory, before any of them is run.

What a line's body asks for is judged by the server when the line is run, and is an error of that line alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from banyan_runtime.batch.duplicates import IdCensus
from banyan_runtime.batch.host.documents import Problem
from banyan_runtime.batch.lines import Invalid, LineParser, LineSplitter, RawLine, Request
from banyan_runtime.storage.store import NotFound, ObjectStore

BLOCK_BYTES: Final = 1 << 20
MAX_PROBLEMS: Final = 100
DEFAULT_MODEL: Final = "default"  # which the server takes for its own


@dataclass(frozen=True, slots=True)
class Rules:
    """What a batch may be. `models`: the names that the server serves, the canonical one first."""

    endpoint: str
    models: tuple[str, ...]
    max_lines: int = 50_000


@dataclass(frozen=True, slots=True)
class Examined:
    """`total` lines can be run, or there are `problems`. `model`: what the first line asks for."""

    total: int
    model: str | None
    problems: list[Problem]


class _Body(msgspec.Struct):
    model: str | None = None


_body = msgspec.json.Decoder(_Body)


def examine(store: ObjectStore, key: str, rules: Rules) -> Examined:
    """Blocks. Raises StoreError."""
    parser = LineParser(rules.endpoint)
    census = IdCensus()
    problems: list[Problem] = []
    total, model = 0, None
    try:
        for raw in _lines(store, key):
            total += 1
            if total > rules.max_lines:
                message = f"The file has more than {rules.max_lines} requests, the most that a batch may have."
                return Examined(0, None, [Problem("too_many_tasks", message)])
            line = parser.parse(raw)
            if isinstance(line, Request):
                census.add(line.custom_id)
                asked = _model(line)
                model = model or asked
                problem = _foreign(line, asked, rules.models)
            else:
                problem = _problem(line)
            if problem is not None and len(problems) < MAX_PROBLEMS:
                problems.append(problem)
    except NotFound:
        return Examined(0, None, [Problem("file_not_found", "The input file was deleted before it was read.", "input_file_id")])
    if not total:
        return Examined(0, None, [Problem("empty_file", "The file holds no request.")])
    suspects = census.suspects()
    if len(suspects) and len(problems) < MAX_PROBLEMS:
        for raw in _lines(store, key):
            line = parser.parse(raw)
            if isinstance(line, Request) and suspects.seen_before(line.custom_id) and len(problems) < MAX_PROBLEMS:
                message = f"The custom_id '{line.custom_id[:200]}' occurs in an earlier line; it must be unique in the file."
                problems.append(Problem("duplicate_custom_id", message, "custom_id", line.number))
    problems.sort(key=lambda problem: problem.line or 0)
    return Examined(0 if problems else total, model, problems)


def _problem(line: Invalid) -> Problem | None:
    """None: it is the line's own matter, and becomes its error line."""
    if line.param is not None and line.param.startswith("body."):
        return None
    return Problem(line.code, line.message, line.param, line.number)


def _foreign(line: Request, asked: str | None, served: tuple[str, ...]) -> Problem | None:
    if asked is None or asked == DEFAULT_MODEL or asked in served:
        return None
    message = f"The model `{asked[:200]}` does not exist. This server serves {', '.join(f'`{name}`' for name in served)}."
    return Problem("model_not_found", message, "body.model", line.number)


def _model(line: Request) -> str | None:
    try:
        return _body.decode(line.body).model
    except (msgspec.MsgspecError, RecursionError):
        return None  # the server will say what is wrong with it


def _lines(store: ObjectStore, key: str) -> Iterator[RawLine]:
    info = store.head(key)
    splitter = LineSplitter()
    for start in range(0, info.size, BLOCK_BYTES):
        yield from splitter.feed(store.get(key, start=start, end=min(start + BLOCK_BYTES, info.size), if_match=info.tag))
    yield from splitter.finish()
