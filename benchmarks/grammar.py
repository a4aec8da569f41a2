"""What grammars cost: compiling a schema, the mask of a step and the token that came, for each vocabulary.

    python benchmarks/grammar.py [--rounds 20] [--out benchmarks/results/DATE-grammar.json]

Vocabularies: SmolLM2's of 49,152 tokens, and Qwen3's of 151,936 rows where npm can fetch it. A matcher follows the tokens of a text
that obeys the schema; the first mask of an output is told apart, since it is the slowest. One thread, milliseconds to compile and
microseconds for a mask and for a token, all of computing time, so that a busy machine does not count.

Then the masks of a step of 64 outputs, each at a place of its own: one after another and side by side, by turns, microseconds of the clock.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
import tokenizers

from banyan_runtime.grammar import schema
from banyan_runtime.grammar.llguidance import LlguidanceBackend
from banyan_runtime.grammar.masks import FEW_THREADS, MaskFiller
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.hub import resolve
from banyan_runtime.model.host import cores
from banyan_runtime.wire import Grammar
from tests.conftest import npm_tokenizer

OUTPUTS = 64  # of a step
PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}, "happy": {"type": "boolean"}}
NODE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["leaf", "branch", "root"]},
        "label": {"type": "string", "maxLength": 40},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "made": {"type": "string", "format": "date"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["kind", "label", "code", "made", "children"],
}
LEAF = {"kind": "leaf", "label": "the last of a row of things", "code": "ABC-1234", "made": "2026-11-22", "children": []}
FIELDS = [({"type": "string"}, "some words of text"), ({"type": "integer"}, 1234), ({"type": "boolean"}, True), ({"enum": ["a", "b"]}, "b")]
MANY = {f"field_{index}": FIELDS[index % len(FIELDS)] for index in range(200)}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "small": ({"type": "object", "properties": PERSON, "required": list(PERSON)}, {"name": "Ada Lovelace", "age": 36, "happy": True}),
    "nested": (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {**LEAF, "kind": "root", "children": [{**LEAF, "children": [LEAF]}, LEAF]},
    ),
    "200 required": (
        {"type": "object", "properties": {name: field for name, (field, _) in MANY.items()}, "required": list(MANY)},
        {name: value for name, (_, value) in MANY.items()},
    ),
    "200 optional": (
        {"type": "object", "properties": {name: field for name, (field, _) in MANY.items()}},
        {name: value for name, (_, value) in list(MANY.items())[::7]},
    ),
}


def vocabularies() -> Iterator[tuple[str, Path, int]]:
    """Name, folder of the tokenizer, rows of the model's head."""
    yield "SmolLM2", resolve("catalog://smollm2-135m"), 49_152
    try:
        yield "Qwen3", npm_tokenizer("qwen3"), 151_936
    except BaseException as error:  # pytest's skip is no Exception
        print(f"without Qwen3's vocabulary: {error}", file=sys.stderr)


def measure(backend: LlguidanceBackend, vocabulary: Vocabulary, ids: list[int], grammar: Grammar, rounds: int) -> dict[str, float]:
    """Compiled once; followed `rounds` times."""
    begun = time.process_time()
    compiled = backend.compile(grammar)
    compile_s = time.process_time() - begun
    words = np.zeros(-(-vocabulary.size // 32), dtype=np.uint32)
    first: list[float] = []
    fills: list[float] = []
    accepts: list[float] = []
    for _ in range(rounds):
        matcher = compiled.matcher(vocabulary.eos_ids)
        for place, token_id in enumerate(ids):
            begun = time.thread_time()
            matcher.fill(words)
            filled = time.thread_time()
            assert matcher.accept(token_id), (place, token_id)
            accepts.append(time.thread_time() - filled)
            (fills if place else first).append(filled - begun)
    return {
        "compile_ms": round(compile_s * 1e3, 2),
        "first_mask_us": round(first[0] * 1e6, 1),
        "mask_us_p50": _percentile(fills, 50),
        "mask_us_mean": round(statistics.mean(fills) * 1e6, 1),
        "mask_us_p99": _percentile(fills, 99),
        "accept_us_p50": _percentile(accepts, 50),
        "tokens": len(ids),
    }


def together(backend: LlguidanceBackend, vocabulary: Vocabulary, ids: list[int], grammar: Grammar, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` steps of each way, on one core and on all: at least as many threads as a server would have."""
    compiled = backend.compile(grammar)
    places = [index * (len(ids) - 1) // OUTPUTS for index in range(OUTPUTS)]
    masks = np.zeros((OUTPUTS, -(-vocabulary.size // 32)), dtype=np.uint32)
    ways = {
        "one_by_one_us": MaskFiller(backend.side_by_side, 1),
        "side_by_side_us": MaskFiller(backend.side_by_side, max(cores(), FEW_THREADS)),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, filler in ways.items():
            matchers = [compiled.matcher(vocabulary.eos_ids) for _ in places]
            for matcher, place in zip(matchers, places, strict=True):
                for token_id in ids[:place]:
                    assert matcher.accept(token_id)
            begun = time.perf_counter()
            assert not any(filler.fill(matchers, masks))
            taken[way].append(time.perf_counter() - begun)
    medians = {way: round(statistics.median(seconds) * 1e6, 1) for way, seconds in taken.items()}
    return {"outputs": OUTPUTS, **medians, "ratio": round(medians["one_by_one_us"] / medians["side_by_side_us"], 2)}


def _percentile(seconds: list[float], percent: int) -> float:
    return round(float(np.percentile(seconds, percent)) * 1e6, 1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--out", type=Path)
    asked = options.parse_args()
    rows: list[dict[str, Any]] = []
    for name, folder, size in vocabularies():
        vocabulary = Vocabulary.load(folder, size, [2] if name == "SmolLM2" else [151_645])
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        begun = time.process_time()
        backend = LlguidanceBackend(vocabulary)
        set_up_s = round(time.process_time() - begun, 2)
        for case, (wanted, value) in CASES.items():
            ids = tokenizer.encode(json.dumps(value), add_special_tokens=False).ids
            grammar = Grammar("json_schema", schema.prepare(wanted))
            row = measure(backend, vocabulary, ids, grammar, asked.rounds) | together(backend, vocabulary, ids, grammar, asked.rounds)
            rows.append({"vocabulary": size, "schema": case, "set_up_s": set_up_s, **row})
            print(json.dumps(rows[-1]), flush=True)
    versions = {package: importlib.metadata.version(package) for package in ("llguidance", "tokenizers")}
    result = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "load": os.getloadavg()[0], "versions": versions, "rows": rows}
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
