"""The cases that people use, drawn from a seed: the same name and seed are the same requests, on every machine.

Prompts are random token ids, so that no two tokenizers give one prompt different lengths. Another seed has other ids, so a case
that is played again with it meets nothing that is cached.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final

from load.plan import Ask, Plan, Session

CASES: Final = {
    "bs1": "1 stream: 128 tokens in, 64 out, 4 requests one after another",
    "concN": "N streams, closed loop: 128 in, 64 out, two requests a stream (conc16, conc64 ...)",
    "poisson:RATE": "RATE requests a second at random times, 128 in, 64 out, 64 requests (poisson:2.5)",
    "sharegpt": "lognormal lengths: in 160 in median (at most 2048), out 200 (at most 1024); 48 requests, 16 at a time (sharegpt100: 100)",
    "prefix": "16 at once: 1,024 shared tokens and 32 own, 16 out; to a cache without them (cold), then with other own ones (warm)",
    "turns": "8 conversations of 6 turns at once, each 128 tokens more in and 64 out",
    "prefill8k": "1 request of 8,192 tokens, 1 out (prefill2k: 2,048)",
    "offline": "256 requests at once, 100 to 1,024 in and out, temperature 0.6 (offline32: 32)",
}
IDS: Final = range(300, 8000)  # ordinary tokens of every vocabulary here: those before may be special or bytes, the 7 M shape ends at 8,192

PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64


class UnknownCase(ValueError):
    """Names what there is."""

    def __init__(self, name: str) -> None:
        lines = "\n".join(f"  {case:14} {words}" for case, words in CASES.items())
        super().__init__(f"there is no case {name!r}; there are\n{lines}")


def plans(case: str, seed: int) -> list[Plan]:
    """What `case` asks, in one plan or in several to be played in their order. Raises UnknownCase."""
    found = re.fullmatch(r"(bs1|[a-z]+)(?::([\d.]+)|(\d+)(k?))?", case)
    if found is None:
        raise UnknownCase(case)
    name, rate, number, thousands = found.groups()
    make = _MAKERS.get(name)
    if make is None or (rate is None) == (name == "poisson") or bool(thousands) != (name == "prefill"):
        raise UnknownCase(case)
    value = float(rate) if rate else int(number) if number else _DEFAULTS.get(name, 0)
    if not value:
        raise UnknownCase(case)
    # A string seeds the same everywhere, and cases do not share prompts.
    return make(case, value, random.Random(f"{case} {seed}"))


def _ids(dice: random.Random, count: int) -> tuple[int, ...]:
    return tuple(dice.choices(IDS, k=count))


def _one(ask: Ask, due_s: float = 0.0) -> Session:
    return Session((ask,), due_s)


def _fixed(dice: random.Random, count: int) -> tuple[Ask, ...]:
    return tuple(Ask(_ids(dice, PROMPT_TOKENS), OUTPUT_TOKENS) for _ in range(count))


def _bs1(case: str, _: float, dice: random.Random) -> list[Plan]:
    return [Plan(case, (Session(_fixed(dice, 4)),), concurrent=1)]


def _conc(case: str, streams: float, dice: random.Random) -> list[Plan]:
    return [Plan(case, tuple(map(_one, _fixed(dice, 2 * int(streams)))), concurrent=int(streams))]


def _poisson(case: str, rate: float, dice: random.Random) -> list[Plan]:
    due_s, sessions = 0.0, []
    for ask in _fixed(dice, 64):
        sessions.append(_one(ask, due_s))
        due_s += dice.expovariate(rate)
    return [Plan(case, tuple(sessions), concurrent=len(sessions))]


def _sharegpt(case: str, requests: float, dice: random.Random) -> list[Plan]:
    def length(median: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * dice.lognormvariate(0, sigma))))

    asks = [Ask(_ids(dice, length(160, 1.2, 2048)), length(200, 0.9, 1024)) for _ in range(int(requests))]
    return [Plan(case, tuple(map(_one, asks)), concurrent=16)]


def _prefix(case: str, requests: float, dice: random.Random) -> list[Plan]:
    shared = _ids(dice, 1024)
    return [
        Plan(f"{case} {state}", tuple(_one(Ask(shared + _ids(dice, 32), 16)) for _ in range(int(requests))), concurrent=int(requests))
        for state in ("cold", "warm")
    ]


def _turns(case: str, sessions: float, dice: random.Random) -> list[Plan]:
    return [Plan(case, tuple(Session(_fixed(dice, 6)) for _ in range(int(sessions))), concurrent=int(sessions), conversation=True)]


def _prefill(case: str, thousands: float, dice: random.Random) -> list[Plan]:
    return [Plan(case, (_one(Ask(_ids(dice, 1024 * int(thousands)), 1)),), concurrent=1)]


def _offline(case: str, requests: float, dice: random.Random) -> list[Plan]:
    asks = [Ask(_ids(dice, dice.randint(100, 1024)), dice.randint(100, 1024)) for _ in range(int(requests))]
    return [Plan(case, tuple(map(_one, asks)), concurrent=len(asks), temperature=0.6)]


_MAKERS: Final[dict[str, Callable[[str, float, random.Random], list[Plan]]]] = {
    "bs1": _bs1, "conc": _conc, "poisson": _poisson, "sharegpt": _sharegpt, "prefix": _prefix, "turns": _turns, "prefill": _prefill,
    "offline": _offline,
}  # fmt: skip
_DEFAULTS: Final = {"bs1": 1, "sharegpt": 48, "prefix": 16, "turns": 8, "offline": 256}  # conc and prefill need a number
