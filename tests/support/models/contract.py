"""What every runner must do, whatever steps it is given: random schedules against a plain computation of the same texts.

A play hands out rows, slots and work at random, which no scheduler would do, and keeps nothing but what the seam allows: rows
change hands, prefixes are shared, slots of a row are exchanged for others that hold the same, requests are retracted and come
back elsewhere, a row fails in the middle, and a step is launched before the one before it is known. Drafts are right as far as
another play of the same requests knows, and wrong now and then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from banyan_runtime.model import noise
from banyan_runtime.step import Handle, Runner, Step
from tests.support.models.driver import Driver, Pending, Request

F64 = npt.NDArray[np.float64]
Logits = Callable[[list[int]], torch.Tensor]  # tokens → logits [tokens, vocabulary], of the model that the runner has

CLOSE = 2e-4  # log probabilities
TIE = 1e-3  # what rounding may exchange
ROWS, CONTEXT, TOP = 6, 192, 4


@dataclass(frozen=True)
class Settings:
    """How a play goes."""

    seed: int
    page_size: int = 1
    overlap: bool = False
    poison: int | None = None  # a token whose embedding is NaN
    requests: int = 14


class Play(Driver):
    """Runs random requests to their ends. `done` holds those that were computed, `failed` those that had to fail.

    `known`: what the requests say, by their seeds; with it some of their tokens are drafted.
    """

    def __init__(self, runner: Runner, settings: Settings, known: dict[int, list[int]] | None = None) -> None:
        super().__init__(runner, ROWS, CONTEXT, settings.page_size, settings.seed)
        self.settings = settings
        self.known = known
        self.random = np.random.default_rng(settings.seed)
        self.owners = dict.fromkeys(self.free, 0)
        self.live: list[Request] = []
        self.done: list[Request] = []
        self.poisoned: list[Request] = []
        self.waiting = [self._request(number) for number in range(settings.requests)]
        self.flying: list[tuple[list[Pending], Step, Step, Handle]] = []
        self.events = dict.fromkeys(
            ("shared", "exchanged", "retracted", "chunked", "mixed", "ahead", "failed", "accepted", "refused", "later"), 0
        )

    def play(self) -> None:
        for _ in range(3000):
            if not (self.waiting or self.live):
                break
            self._admit()
            self._exchange()
            self._retract()
            self._launch()
            while len(self.flying) > int(self.settings.overlap and self.random.random() < 0.8):
                self._settle()
            self._leave()
        assert [*self.waiting, *self.live, *self.flying] == []
        assert sorted(self.free) == sorted(self.owners), "the play lost a page"

    def _request(self, number: int) -> Request:
        random, vocabulary = self.random, self.runner.info.vocab_size
        usable = [token for token in range(vocabulary) if token != self.settings.poison]

        def some(count: int) -> list[int]:
            return [usable[i] for i in random.integers(0, len(usable), count)]

        prompt = (some_prefix(vocabulary, self.settings) if random.random() < 0.5 else []) + some(int(random.integers(1, 60)))
        request = Request(prompt, new_tokens=int(random.integers(1, 14)), row=-1, seed=int(random.integers(0, 1 << 62)))
        request.banned = (*some(3), *([] if self.settings.poison is None else [self.settings.poison]))
        if number % 3 == 2:  # may draw the poison
            return dataclasses.replace(request, banned=(), temperature=float(random.choice([0.0, 0.8])))
        wishes: list[dict[str, Any]] = [
            {}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}, {"temperature": 0.7, "min_p": 0.05},
        ]  # fmt: skip
        penalties: list[dict[str, Any]] = [
            {}, {}, {"repetition_penalty": 1.4}, {"presence_penalty": 1.5, "frequency_penalty": 0.5},
            {"repetition_penalty": 0.9, "presence_penalty": -0.5},
        ]  # fmt: skip
        named = {"named": (7, 2, 7)[: number % 4]}
        scores: list[dict[str, Any]] = [{}, {"top_logprobs": 0, **named}, {"top_logprobs": TOP, "score_prompt": True, **named}]
        chosen = [options[int(random.integers(len(options)))] for options in (wishes, penalties, scores)]
        if "bias" in self.runner.info.features and random.random() < 0.3:
            chosen.append({"bias": dict.fromkeys(some(3), 4.0)})
        if "mask" in self.runner.info.features and random.random() < 0.3:
            chosen.append({"allowed": tuple(sorted({*some(40)}))})
        if self.settings.poison is not None and number % 4 == 3:
            prompt[int(random.integers(len(prompt)))] = self.settings.poison
        for wish in chosen:
            request = dataclasses.replace(request, **wish)
        return request

    def _admit(self) -> None:
        rows = sorted(set(range(ROWS)) - {request.row for request in self.live})
        if not (rows and self.waiting and self.random.random() < 0.6):
            return
        request = self.waiting.pop(0)
        request.row = int(self.random.choice(rows))
        sources = [
            (common(request.tokens, other.tokens[: other.computed]), other.row, other) for other in self.live if not request.score_prompt
        ]
        length, _, source = max(sources, default=(0, 0, request), key=lambda found: found[:2])
        length = min(length, len(request.tokens) - 1) // self.page_size * self.page_size
        if length and self.random.random() < 0.8:
            self.share(source, request, length)
            for page in self._pages(request):
                self.owners[page] += 1
            self.events["shared"] += 1
        self.live.append(request)

    def _exchange(self) -> None:
        """Point a row at another's slots that hold the same tokens, as a prefix cache does with what was computed twice."""
        size = self.page_size
        both = [(a, b, common(a.tokens[: a.computed], b.tokens[: b.computed])) for a in self.live for b in self.live if a is not b]
        pairs = [pair for pair in both if pair[2] >= 2 * size]
        if self.flying or not pairs or self.random.random() < 0.5:
            return
        target, source, length = pairs[int(self.random.integers(len(pairs)))]
        end = length // size
        start = int(self.random.integers(0, end))
        for page in range(start, end):
            old, new = (int(self.table[request.row, page * size]) // size for request in (target, source))
            self.owners[new] += 1
            self._give(old)
        slots = self.table[source.row, start * size : end * size].copy()
        self.table[target.row, start * size : end * size] = slots
        self.updates.append((target.row, start * size, slots))
        self.events["exchanged"] += 1

    def _retract(self) -> None:
        known = [r for r in self.live if -1 not in r.output and not any(p.request is r for pending, *_ in self.flying for p in pending)]
        if known and self.random.random() < 0.05:
            request = known[int(self.random.integers(len(known)))]
            self._release(request)
            request.computed, request.told = 0, False
            self.waiting.insert(0, request)
            self.events["retracted"] += 1

    def _launch(self) -> None:
        ready = [r for r in self.live if not r.done and not r.failed and (r.computed < len(r.tokens)) and not r.drafts]
        chosen = [r for r in ready if self.random.random() < 0.7]
        if not chosen:
            return
        work = []
        for request in chosen:
            left = len(request.tokens) - request.computed
            whole = left == 1 or self.random.random() < 0.5
            work.append((request, left if whole else int(self.random.integers(1, left))))
            if whole and self.known is not None:
                request.drafts = self._drafts(request, self.known[request.seed])
        self._send(work)

    def _send(self, work: list[tuple[Request, int]]) -> None:
        step = read_only(self.build(work))
        for (request, _), length in zip(work, step.kv_lens.tolist(), strict=True):
            for page in self._pages(request, length)[-(-request.computed // self.page_size) :]:
                self.owners[page] += 1
        mask, can = step.mask, step.mode == "decode" and bool(step.samples.any())
        later = can and self.random.random() < (0.1 if mask is None else 0.8)
        if later:
            step = dataclasses.replace(step, mask=None, mask_later=True)
        copied = deep_copy(step)
        handle = self.runner.launch(step)
        if later:
            while self.flying and self.random.random() < 0.5:
                self._settle()
            handle.draw(mask)
        self.flying.append((self.advance(work, step), step, copied, handle))
        self.events["chunked"] += int((step.samples == 0).any())
        self.events["mixed"] += int(len(set(step.query_lens.tolist())) > 1)
        self.events["ahead"] += int((step.token_ids < 0).any())
        self.events["later"] += int(later and mask is not None)

    def _drafts(self, request: Request, known: list[int]) -> list[int]:
        """Guesses of what follows, of which fewer are needed than are tokens to come; none where penalties count or a token is in
        flight."""
        if request.penalized or -1 in request.output or self.random.random() < 0.3:
            return []
        guesses = [token for token in known if token >= 0][len(request.output) : request.new_tokens - 1][: int(self.random.integers(0, 6))]
        usable = [token for token in range(self.runner.info.vocab_size) if token != self.settings.poison]
        return [int(self.random.choice(usable)) if self.random.random() < 0.2 else guess for guess in guesses]

    def _settle(self) -> None:
        pending, step, copied, handle = self.flying.pop(0)
        result = handle.result()
        assert len(result.token_ids) == int(step.samples.sum())
        assert same(step, copied), "the runner wrote into a step"
        drawn = result.failed[step.samples > 0]
        firsts = (np.cumsum(step.samples) - step.samples)[step.samples > 0]
        assert ((result.token_ids[firsts] == -1) == drawn).all()
        assert drawn.sum() == result.failed.sum(), "only a sequence that samples can fail"
        before = [(one.request.accepted, one.request.refused) for one in pending]
        self.settle(pending, result)
        for one, length, (accepted, refused) in zip(pending, step.kv_lens.tolist(), before, strict=True):
            self.events["accepted"] += one.request.accepted - accepted
            self.events["refused"] += one.request.refused - refused
            for page in self._pages(one.request, length)[-(-one.request.computed // self.page_size) :] if one.samples > 1 else ():
                self._give(page)  # others write there
        self.events["failed"] += int(result.failed.sum())

    def _leave(self) -> None:
        flying = {id(one.request) for pending, *_ in self.flying for one in pending}
        for request in [r for r in self.live if (r.done or r.failed) and id(r) not in flying]:
            self._release(request)
            (self.poisoned if request.failed else self.done).append(request)

    def _pages(self, request: Request, length: int | None = None) -> list[int]:
        length = request.computed if length is None else length
        return (self.table[request.row, 0 : length : self.page_size] // self.page_size).tolist()

    def _release(self, request: Request) -> None:
        for page in self._pages(request):
            self._give(page)
        self.live.remove(request)

    def _give(self, page: int) -> None:
        self.owners[page] -= 1
        if not self.owners[page]:
            self.free.append(page)


def some_prefix(vocabulary: int, settings: Settings) -> list[int]:
    """What half of a play's prompts begin with."""
    tokens = np.random.default_rng(settings.seed + 1).integers(0, vocabulary - 1, 50)
    return [token for token in tokens.tolist() if token != settings.poison]


def common(one: list[int], other: list[int]) -> int:
    """How many tokens at the beginning are the same, and known."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b or a < 0:
            break
        length += 1
    return length


def check(request: Request, logits: Logits) -> None:
    """Every token and score of a request is what the model and the request's own settings say."""
    assert len(request.output) == request.new_tokens
    raw = logits(request.tokens).double().numpy()
    scores = raw - np.log(np.exp(raw - raw.max(1, keepdims=True)).sum(1, keepdims=True)) - raw.max(1, keepdims=True)
    for index, token in enumerate(request.output):
        position = len(request.prompt) + index
        edited = by_the_book(raw[position - 1], request, request.output[:index])
        assert np.isfinite(edited[token]), f"token {token} at position {position} was forbidden"
        assert could_be_drawn(edited, request, position, token), f"token {token} at position {position}"
        if request.top_logprobs >= 0:
            check_scores(request.logprobs[index], scores[position - 1 : position], [token], request.top_logprobs, request.named)
    if request.score_prompt:
        at = 0
        for part in request.prompt_logprobs:
            here = len(part.values)
            check_scores(part, scores[at : at + here], request.prompt[at + 1 : at + 1 + here], max(request.top_logprobs, 0), request.named)
            at += here
        assert at == len(request.prompt) - 1


def check_scores(found: Any, scores: F64, tokens: list[int], top: int, named: tuple[int, ...]) -> None:
    rows = np.arange(len(tokens))
    np.testing.assert_allclose(found.values, scores[rows, tokens], atol=CLOSE)
    assert found.top_ids.shape[1] >= top + len(named)
    assert (found.top_ids[:, found.top_ids.shape[1] - len(named) :] == np.array(named, np.int32)).all(), "the named ones come last"
    np.testing.assert_allclose(found.top_values[:, :top], -np.sort(-scores, 1)[:, :top], atol=CLOSE)
    np.testing.assert_allclose(found.top_values, np.take_along_axis(scores, found.top_ids.astype(np.int64), 1), atol=CLOSE)


def by_the_book(raw: F64, request: Request, output: list[int]) -> F64:
    """Logits as they are sampled from: biases, penalties, bans, mask."""
    logits = raw.copy()
    for token, value in request.bias.items():
        logits[token] += value
    for token in {*request.prompt, *output}:
        logits[token] *= request.repetition_penalty if logits[token] <= 0 else 1 / request.repetition_penalty
    for token in set(output):
        logits[token] -= request.frequency_penalty * output.count(token) + request.presence_penalty
    if request.allowed:
        forbidden = np.ones(len(logits), np.bool_)
        forbidden[list(request.allowed)] = False
        logits[forbidden] = -np.inf
    logits[list(request.banned)] = -np.inf
    return logits


def could_be_drawn(logits: F64, request: Request, position: int, token: int) -> bool:
    """Whether the token is the one to be drawn, but for what rounding may exchange at the edges of filters and between equals."""
    if request.temperature < 1e-6:
        return bool(logits[token] >= logits.max() - TIE)
    scaled = logits / request.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    with np.errstate(divide="ignore"):
        bits = noise.hashes(np.array([request.seed], np.uint64), np.array([position], np.int32), torch.arange(len(p)))
        noisy = np.log(p) + noise.gumbel(bits)[0].numpy()
    surely, perhaps = kept(p, request, -TIE), kept(p, request, TIE)
    return bool(perhaps[token] and noisy[token] >= noisy[surely].max() - TIE)


def kept(p: F64, request: Request, slack: float) -> npt.NDArray[np.bool_]:
    order = np.lexsort((np.arange(len(p)), -p))
    before = np.empty_like(p)
    before[order] = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
    keep = before <= (request.top_p + slack if request.top_p < 1 else 2)
    if request.top_k > 0:
        keep &= p >= p[order][request.top_k - 1] * (1 - slack)
    keep &= p >= request.min_p * p.max() * (1 - slack)
    keep[order[0]] = True
    return keep & (p > 0)


def read_only(step: Step) -> Step:
    for array in arrays(step):
        array.setflags(write=False)
    return step


def arrays(value: Any) -> list[npt.NDArray[np.generic]]:
    """All arrays of a step, in the order of its fields."""
    if isinstance(value, np.ndarray):
        return [value]
    if dataclasses.is_dataclass(value):
        return [array for field_ in dataclasses.fields(value) for array in arrays(getattr(value, field_.name))]
    return []


def deep_copy(step: Step) -> Step:
    def copied(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.copy()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(value, **{f.name: copied(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    made: Step = copied(step)
    return made


def same(one: Step, other: Step) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(arrays(one), arrays(other), strict=True))
