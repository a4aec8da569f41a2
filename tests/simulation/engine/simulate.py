"""The engine under a fake model and clock, with random arrivals, lengths, aborts, flushes and NaN rows, in random small
configurations. Everything is drawn from a seed, so a failure replays:

    python -m tests.simulation.engine.simulate --seed S --steps N       (pytest: BANYAN_SIM_SEED=S)
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import msgspec

from banyan_runtime.engine.drafts import Drafts, room_for
from banyan_runtime.engine.limits import BackgroundLimits, EngineLimits
from banyan_runtime.engine.loop import Engine
from banyan_runtime.engine.memory.tables import Tables
from banyan_runtime.engine.out_of_memory import WINDOW_S, StepBounds
from banyan_runtime.engine.policy import OVERDUE_BATCHES
from banyan_runtime.engine.request import Request
from banyan_runtime.step import I32, Step
from banyan_runtime.wire import (
    PRIORITY_AT_MOST,
    Abort,
    EngineMessage,
    Failed,
    FinishCode,
    Flush,
    Flushed,
    LogprobRequest,
    Proceed,
    Sampling,
    Stats,
    StepOutput,
    Submit,
    pack_ids,
)
from tests.unit.engine import invariants
from tests.unit.engine.fake import DULL_SEED, NAN_SEED, VOCAB, FakeRunner, continuation, penalised
from tests.unit.engine.grammars import Rule, Rules, constraint
from tests.unit.engine.order import Order
from tests.unit.engine.outputs import Scores, tokens_of

WORLD_STEPS = 2_000  # scheduler steps before a new world (configuration and load) is drawn, unless it is said
FULL_CHECK_EVERY = 101  # turns between full checks; the balance the engine checks after each and logs, the mirror each step
PENALTIES: Final[tuple[dict[str, float], ...]] = ({"presence_penalty": 0.5}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.1})

LINES: Final = (
    "Prefill batch. ", "Decode batch. ", "KV cache pool is full. ", "Requests of lower priority give way. ", "Out of memory in a ",
    "The model computed NaN. ",
)  # fmt: skip


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


@dataclass
class Sent:
    """A request as the front remembers it."""

    prompt: list[int]
    sampling: Sampling
    scores: Scores
    turn: int
    held: bool
    background: bool
    grammar: int | None  # the key of its rule
    aborted: bool = False
    outputs: list[int] = field(default_factory=list)
    future: list[int] = field(default_factory=list)

    def says(self, start: int, count: int) -> list[int]:
        """Its output from token `start` on."""
        if len(self.future) < start + count:
            self.future = self.text(2 * (start + count))
        return self.future[start : start + count]

    @property
    def rule(self) -> Rule | None:
        return None if self.grammar is None else Rule(self.grammar, VOCAB)

    def text(self, count: int) -> list[int]:
        """What it should say: so many tokens, the last one -1 where it fails before."""
        return list(islice(continuation(self.prompt, self.sampling, self.rule), count))


class Guesser(Drafts):
    """Guesses what requests will really say, and something else now and then; whatever it costs."""

    def __init__(self, most: int, live: dict[int, Sent], rng: random.Random) -> None:
        super().__init__(most)
        self._live = live
        self._rng = rng

    def propose(self, requests: Sequence[Request], rows: I32, tables: Tables) -> list[list[int]] | None:
        guesses = []
        for request, length in zip(requests, tables.length[rows].tolist(), strict=True):
            can = not request.penalised and request.matcher is None
            count = self._rng.randint(0, max(0, min(self._most, room_for(request, length)))) if can else 0
            said = self._live[request.id].says(length - request.prompt_len, count)
            guesses.append([token if self._rng.random() < 0.8 and token >= 0 else self._rng.randrange(VOCAB) for token in said])
        return guesses if any(guesses) else None


@dataclass
class Totals:
    """What happened, to show that a run meant something."""

    steps: int = 0
    turns: int = 0
    worlds: int = 0
    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    retractions: int = 0
    cached: int = 0
    evicted: int = 0
    held: int = 0
    penalised: int = 0
    passed: int = 0  # times that a request was passed by for its priority
    constrained: int = 0
    masked_later: int = 0  # steps whose masks came behind their launch
    mixed: int = 0  # steps of prompts that took along who ran
    mixed_masked_later: int = 0
    complete: int = 0  # outputs that their grammar ended
    disobeyed: int = 0  # grammars that failed
    missed: int = 0  # steps that there was no memory for
    lost: int = 0  # requests in them
    scored: int = 0  # tokens whose log probability was told
    scored_prompts: int = 0  # prompt tokens, likewise
    background: int = 0  # requests
    beside: int = 0  # rows of background in steps with online ones
    short: int = 0  # steps of background that were kept short
    accepted: int = 0  # drafts that were right
    refused: int = 0
    longest_stay: int = 0  # turns from submission to the end


@dataclass(frozen=True)
class Load:
    """What the clients of a world are like."""

    rate: float  # probability of an arrival in a turn
    crowd: int  # requests that are there at once, at most
    base_len: int  # tokens of the texts that prompts are made from
    max_new: int
    stops: tuple[tuple[int, ...], ...]
    salts: tuple[str, ...]
    abort_rate: float
    nan_rate: float
    dull_rate: float  # requests whose text is easily guessed
    penalty_rate: float
    grammar_rate: float
    hold_rate: float
    miss_rate: float  # steps that there is no memory for
    score_rate: float
    own_prefix_rate: float  # requests with prefix ids of their own
    slowness: float  # of steps
    priorities: tuple[int, ...]


def draw_limits(rng: random.Random) -> EngineLimits:
    page = rng.choice((1, 1, 1, 16, 16, 32))
    pool = page * rng.randint(3, 12) if page > 1 else rng.choice((rng.randint(16, 60), rng.randint(60, 250)))
    overlap = rng.random() < 0.5
    drafts = 0 if overlap else rng.choice((0, 0, 0, 2, 6, 12))
    return EngineLimits(
        context_len=rng.choice((4096, 4096, rng.randint(20, 120))),
        pool_tokens=pool,
        page_size=page,
        max_running=min(rng.choice((1, 2, 4, 8, 16)), pool // page),
        max_queued=rng.choice((3, 20, 60)),
        max_prefill_tokens=rng.choice((8, 32, 16_384)),
        chunk=rng.choice((None, page, 2 * page, 8 * page)),
        ageing_batches=rng.choice((2, 16, 64)),
        prefill_step_s=rng.choice((0.0, 0.001)),
        policy=rng.choice(("fcfs", "lpm")),
        radix=rng.random() < 0.8,
        conservativeness=rng.choice((0.1, 0.5, 1.0)),
        mixed=not drafts and rng.random() < 0.4,
        overlap=overlap,
        draft_tokens=drafts,
        background=BackgroundLimits(
            rows_beside=rng.choice((1, 2, 4)),
            prefill_every=rng.choice((1, 5, 128)),
            step_s=rng.choice((0.0005, 0.15)),
            lately_s=rng.choice((0.0, 0.05, 10.0)),
        ),
        vocab_size=VOCAB,
    )


def draw_load(rng: random.Random, limits: EngineLimits) -> Load:
    pool = limits.pool_tokens
    return Load(
        rate=rng.choice((0.02, 0.1, 0.5, 1.0)),
        crowd=limits.max_running + rng.choice((3, 8, limits.max_queued - 2)),
        base_len=rng.choice((4, pool // 12 + 2, pool // 4)),
        max_new=max(2, rng.choice((1, 5, 30, pool // 4, pool // 2))),
        stops=rng.choice((((),), ((), (3,), (1, 2), tuple(range(10, 20))))),
        salts=rng.choice((("",), ("", "a", "b"))),
        abort_rate=rng.choice((0.0, 0.003, 0.05)),
        nan_rate=rng.choice((0.0, 0.0, 0.05)),
        **draw_wishes(rng),
    )


def draw_wishes(rng: random.Random) -> dict[str, Any]:
    return {
        "dull_rate": rng.choice((0.0, 0.5, 1.0)),
        "penalty_rate": rng.choice((0.0, 0.1, 1.0)),
        "grammar_rate": rng.choice((0.0, 0.0, 0.2, 1.0)),
        "hold_rate": rng.choice((0.0, 0.0, 0.1)),
        "miss_rate": rng.choice((0.0, 0.0, 0.0, 0.005, 0.05)),
        "score_rate": rng.choice((0.0, 0.2, 0.8)),
        "own_prefix_rate": rng.choice((0.0, 0.0, 0.3)),
        "slowness": rng.choice((0.05, 0.3, 1.0)),
        "priorities": rng.choice(
            (
                (0,),
                (0,),
                (0, 0, 1),
                (-5, 0, 0, 3),
                (-10, -10, 0),
                (-100, -10, -10),
                (-PRIORITY_AT_MOST, 0, PRIORITY_AT_MOST),
                (PRIORITY_AT_MOST,),
            )
        ),
    }


def overload(rng: random.Random, limits: EngineLimits) -> tuple[EngineLimits, Load]:
    """Many short prompts with long answers, admitted without caution: the pool is full again and again."""
    page = limits.page_size
    pool = page * rng.randint(6, 14) if page > 1 else rng.randint(60, 250)
    limits = replace(
        limits,
        context_len=4096,
        pool_tokens=pool,
        max_running=min(16, pool // page),
        conservativeness=0.1,
        chunk=rng.choice((None, 8 * page)),
        max_prefill_tokens=16_384,
        max_queued=20,
    )
    load = Load(
        rate=1.0, crowd=limits.max_running + 6, base_len=3, max_new=pool // rng.choice((2, 3, 5)), stops=((),), salts=("",),
        abort_rate=rng.choice((0.0, 0.02)), nan_rate=rng.choice((0.0, 0.02)), **draw_wishes(rng),
    )  # fmt: skip
    return limits, load


class World:
    """One configuration under one load, until it is drained."""

    def __init__(self, seed: int, totals: Totals) -> None:
        self.rng = rng = random.Random(seed)
        limits = draw_limits(rng)
        load = draw_load(rng, limits)
        if rng.random() < 0.35:
            limits, load = overload(rng, limits)
        self.limits, self.load, self.totals = limits, load, totals
        self.runner = FakeRunner(limits.pool_tokens, limits.page_size, limits.context_len, lazy=rng.random() < 0.5)
        self.clock = Clock()
        self.engine = Engine(self.runner, limits, self.clock, self._log, Rules(VOCAB))
        self.live: dict[int, Sent] = {}
        self.missed = set[int]()  # requests that were in a step without memory
        if limits.draft_tokens and rng.random() < 0.5:
            self.engine.scheduler.drafts = Guesser(limits.draft_tokens, self.live, rng)
        self.runner.watch = self._launched
        self.runner.misses = self._misses
        self.engine.scheduler.prefill.bounds = StepBounds(limits.page_size, least=limits.page_size)
        self.order = Order(self.engine, self.limits, max(load.priorities))
        self.texts = [[rng.randrange(VOCAB) for _ in range(load.base_len)] for _ in range(3)]
        self.next_id = 0
        self.flushes = 0
        self.turn = 0
        # One request after another in the worst case, each computed with a decode step after each piece of its prompt,
        # and put off and computed again now and then; a request without a limit of its own may take the whole pool alone.
        pieces = 2 * -(-limits.max_model_len // (limits.chunk or limits.max_model_len))
        self._turns_of_one = load.max_new + pieces + 8
        self._turns_of_a_giant = limits.max_model_len + pieces
        self.patience = 3 * (load.crowd + 2) * self._turns_of_one
        self.patience += limits.ageing_batches * (max(load.priorities) - min(load.priorities)).bit_length() * self._turns_of_one
        if limits.policy == "lpm":
            self.patience += OVERDUE_BATCHES * self._turns_of_one

    def run(self, steps: int) -> None:
        while self.runner.steps < steps:
            self._act()
            self._turn()
            if not self.engine.has_work and self.load.rate < 0.1:
                self._submit()
        while self.held:
            self._proceed()
        while self.engine.has_work:
            self._turn()
        invariants.check(self.engine)
        assert not self.live, f"requests without an end: {list(self.live)}"
        assert not self.engine.requests
        self.totals.steps += self.runner.steps
        self.totals.turns += self.turn
        self.totals.worlds += 1
        self.totals.beside += self.order.beside
        self.totals.accepted += self.engine._report.draft_tokens_accepted
        self.totals.refused += self.engine._report.draft_tokens - self.engine._report.draft_tokens_accepted
        self.totals.short += self.order.short
        self.totals.passed += sum(self.order.passed.values())
        self.totals.evicted += self.engine.memory.evicted_tokens

    def _log(self, line: str) -> None:
        assert line.startswith(LINES), line

    def _launched(self, step: Step) -> None:
        if self.runner.steps % 16 == 0:
            invariants.check_owned(self.engine, step)
        self.clock.now += self.rng.random() * 0.003 * self.load.slowness
        self.totals.masked_later += step.mask_later
        self.totals.mixed += step.mode == "mixed"
        self.totals.mixed_masked_later += step.mask_later and step.mode == "mixed"
        invariants.check_mirror(self.engine, self.runner)
        self.order.check()
        self.order.check_class(step)

    def _misses(self, step: Step) -> bool:
        if self.rng.random() >= self.load.miss_rate:
            return False
        self.clock.now += WINDOW_S  # none is the second within it
        self.totals.missed += 1
        self.missed = {id for id, request in self.engine.requests.items() if request.row in step.rows.tolist()}
        return True

    def _act(self) -> None:
        rng, load = self.rng, self.load
        if len(self.live) < load.crowd and rng.random() < load.rate:
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                self._submit()
        if self.held and rng.random() < 0.1:
            self._proceed()
        if self.live and rng.random() < load.abort_rate:
            waiting = [id for id in self.live if id in self.engine.requests and self.engine.requests[id].row < 0]
            victim = rng.choice([*self.live, *waiting[:1] * len(self.live)])  # half of them stand first
            self.live[victim].aborted = True
            self.engine.handle(Abort(id=victim))
            assert self.engine.memory.imbalance() == 0
        if rng.random() < 0.001:
            self.flushes += 1
            self.engine.handle(Flush(seq=self.flushes))
            self.engine.handle(Proceed(id=self.next_id + 1))
            self.engine.handle(Abort(id=self.next_id + 1))

    @property
    def held(self) -> list[int]:
        return [id for id, sent in self.live.items() if sent.held]

    def _proceed(self) -> None:
        """One of the held requests goes on."""
        id = self.rng.choice(self.held)
        self.live[id].held = False
        self.live[id].turn = self.turn - (self.order.online_turns if self.live[id].background else 0)
        self.engine.handle(Proceed(id=id))

    def _submit(self) -> None:
        rng, limits, load = self.rng, self.limits, self.load
        base = rng.choice(self.texts)
        prompt = list(base)
        if rng.random() < 0.8:
            prompt = base[: rng.randint(0, len(base))] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        max_new = rng.randint(rng.choice((0, 1, load.max_new // 2)), load.max_new)
        if rng.random() < 0.99:
            prompt = prompt[: max(1, limits.max_model_len - load.max_new)]
            max_new = min(max_new, limits.max_model_len - len(prompt))
        if rng.random() < 0.002:
            self.patience += self._turns_of_a_giant
            max_new = max(0, limits.max_model_len - len(prompt))
        sampling = Sampling(
            max_new_tokens=max_new,
            min_new_tokens=rng.choice((0, 0, 0, 4)),
            seed=rng.getrandbits(16)
            | (NAN_SEED if rng.random() < load.nan_rate else 0)
            | (DULL_SEED if rng.random() < load.dull_rate else 0),
            stop_token_ids=rng.choice(load.stops),
            **(rng.choice(PENALTIES) if rng.random() < load.penalty_rate else {}),
        )
        logprobs = None
        if rng.random() < load.score_rate:
            wish = rng.randint(-1, 2), rng.choice((-1, 0, 1, rng.randint(0, len(prompt)))), rng.randint(0, 2)
            logprobs = LogprobRequest(*wish, pack_ids([(self.next_id + place) % 10 for place in range(self.next_id % 4)]))
        # ids that stand for a picture in the middle of the prompt
        prefix_ids = [-1 - token // 10 if 2 <= place < 5 else token for place, token in enumerate(prompt)]
        self.next_id += 1
        held = rng.random() < load.hold_rate
        grammar = rng.getrandbits(20) if max_new and not held and rng.random() < load.grammar_rate else None
        submit = Submit(
            id=self.next_id,
            token_ids=pack_ids(prompt),
            sampling=sampling,
            priority=rng.choice(load.priorities),
            salt=rng.choice(load.salts),
            prefix_ids=pack_ids(prefix_ids) if rng.random() < load.own_prefix_rate else b"",
            logprobs=logprobs,
            held=held,
            constraint=None if grammar is None else constraint(grammar),
        )
        if submit.prefix_ids:
            # equal prefix ids speak for equal keys and values, so the pictures must be equal too
            prompt[2:5] = [-10 * (id + 1) for id in prefix_ids[2:5]]
            submit = msgspec.structs.replace(submit, token_ids=pack_ids(prompt))
        background = submit.priority < 0
        since = self.order.online_turns if background else 0
        self.live[submit.id] = Sent(prompt, sampling, Scores(logprobs), self.turn - since, held, background, grammar)
        self.totals.background += background
        self.totals.submitted += 1
        self.totals.held += held
        self.totals.penalised += penalised(sampling)
        self.totals.constrained += grammar is not None
        self.engine.handle(submit)

    def _turn(self) -> None:
        self.turn += 1
        for message in self.engine.turn():
            self._receive(message)
        assert not self.missed, "nobody goes on from a step that there was no memory for"
        self.order.check_first()
        self.order.check_gives_way()
        if self.turn % FULL_CHECK_EVERY == 0:
            invariants.check(self.engine)
            for id, sent in self.live.items():
                assert sent.held or self._waited(sent) <= self.patience, f"request {id} starves"

    def _waited(self, sent: Sent) -> int:
        """Turns since its submission; for background those without anybody online."""
        return self.turn - sent.turn - (self.order.online_turns if sent.background else 0)

    def _receive(self, message: EngineMessage) -> None:
        match message:
            case StepOutput():
                self._tokens(message)
            case Failed(id=id, code=code):
                assert (code == "out_of_memory") <= (id in self.missed), "it was in no such step"
                self.missed.discard(id)
                self._failed(self.live.pop(id), code)
            case Flushed(seq=seq, ok=ok):
                assert seq == self.flushes
                if ok:
                    assert self.engine.memory.prefixes.evictable == 0 or self.engine.requests
            case Stats(kv_used=used, kv_evictable=evictable, kv_free=free, running=running, waiting=waiting, held=held):
                assert used + evictable + free == self.limits.pool_tokens
                assert running + waiting + held == len(self.engine.requests)
            case _:
                raise AssertionError(message)

    def _tokens(self, output: StepOutput) -> None:
        for told in output.prompt_logprobs:
            self.live[told.id].scores.take_prompt(told)
            self.totals.scored_prompts += len(told.columns.values) // 4
        for id, tokens in tokens_of(output):
            sent = self.live[id]
            assert not sent.held
            sent.outputs += [token for token, _ in tokens]
            sent.scores.output += [score for _, score in tokens]
            self.totals.scored += sum(score is not None for _, score in tokens)
        for finish in output.finished:
            self.missed.discard(finish.id)  # by the step before
            self._finished(finish.id, finish.code)
            self.totals.retractions += finish.retractions
            self.totals.cached += finish.cached_tokens

    def _finished(self, id: int, code: FinishCode) -> None:
        sent = self.live.pop(id)
        assert sent.outputs == sent.text(len(sent.outputs)), f"request {id}: the text is not the one of an engine without a cache"
        sent.scores.check(sent.prompt, sent.outputs, whole_prompt=code is not FinishCode.ABORT)
        stops = sent.sampling.stop_token_ids
        if code is FinishCode.ABORT:
            assert sent.aborted
            self.totals.aborted += 1
        else:
            assert (sent.outputs[-1:] != [] and sent.outputs[-1] in stops) == (code is FinishCode.STOP)
            complete = sent.rule is not None and code is not FinishCode.STOP and ends(sent.rule, sent.outputs)
            assert complete == (code is FinishCode.COMPLETE)
            assert complete or code is FinishCode.STOP or len(sent.outputs) == sent.sampling.max_new_tokens
            self.totals.complete += complete
            self.totals.finished += 1
        assert not any(token in stops for token in sent.outputs[:-1])
        self.totals.longest_stay = max(self.totals.longest_stay, self._waited(sent))
        if self.rng.random() < 0.2:
            # the next turn of a conversation starts with what was said
            self.texts[self.rng.randrange(3)] = (sent.prompt + sent.outputs)[: max(self.load.base_len, 8)]

    def _failed(self, sent: Sent, code: str) -> None:
        self.totals.failed += 1
        if code in ("internal_error", "invalid_grammar"):
            assert sent.text(len(sent.outputs) + 1) == [*sent.outputs, -1], "only the row with NaN or a broken grammar fails, and there"
            self.totals.disobeyed += code == "invalid_grammar"
            assert sent.grammar is not None or code == "internal_error"
        elif code == "queue_full":
            assert not sent.outputs
        elif code == "out_of_memory":
            assert sent.outputs == sent.text(len(sent.outputs))
            self.totals.lost += 1
        else:
            assert code == "context_length_exceeded"
            assert len(sent.prompt) + sent.sampling.max_new_tokens > self.limits.max_model_len


def ends(rule: Rule, outputs: list[int]) -> bool:
    """Whether the last of these tokens ends what the rule admits."""
    found = [rule.accept(token) and rule.is_terminated for token in outputs]
    assert not any(found[:-1]), "it went on behind its end"
    return any(found)


def worlds(seed: int) -> Iterator[int]:
    """The seeds of the worlds of a run."""
    yield seed
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(32)


def simulate(seed: int, steps: int, world_steps: int = WORLD_STEPS) -> Totals:
    """Run worlds drawn from `seed` until `steps` steps were scheduled. An AssertionError names the world that failed."""
    totals = Totals()
    for world in worlds(seed):
        if totals.steps >= steps:
            return totals
        try:
            World(world, totals).run(world_steps)
        except Exception as error:
            raise AssertionError(f"world {world} failed; replay it with BANYAN_SIM_SEED={world}") from error
    raise AssertionError("unreachable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()
    totals = simulate(arguments.seed, arguments.steps)
    seconds = time.perf_counter() - start
    print(f"{totals}\n{totals.steps} steps in {seconds:.1f} s, {seconds / totals.steps * 1e6:.0f} µs a step")


if __name__ == "__main__":
    main()
