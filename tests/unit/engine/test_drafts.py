"""Drafts: where guesses come from, when they are computed, and that nothing but the number of steps changes by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.drafts import FIRST_BUCKETS, MOST_BUCKETS, SIZES, Text, worth_computing
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.step_cost import WEIGHTS_WORTH
from banyan_runtime.errors import ConfigError
from banyan_runtime.step import MOST_GUESSES
from banyan_runtime.wire import FinishCode, LogprobRequest
from tests.unit.engine import invariants
from tests.unit.engine.cost import lines_run
from tests.unit.engine.fake import DULL_SEED, NAN_SEED, VOCAB, FakeRunner
from tests.unit.engine.session import PAGES, Session, limits
from tests.unit.engine.test_constraints import CONSTRAINT, Counting, Grammars

MANY = 8


def text_of(tokens: list[int], *, at_once: int = 1 << 30) -> tuple[Text, np.ndarray]:
    """Told so many tokens at once."""
    array, text = np.array(tokens, np.int32), Text()
    for length in range(min(at_once, len(tokens)), len(tokens), at_once):
        text.follow(array, length)
    text.follow(array, len(tokens))
    return text, array


def guessed(tokens: list[int], count: int = 4, **told: int) -> list[int]:
    text, array = text_of(tokens, **told)
    return text.guess(array, count)


# --- where guesses come from ---


def test_a_guess_is_what_followed_the_same_tokens_before() -> None:
    assert guessed([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]) == [4, 5, 6, 7]


def test_the_longest_match_counts_more_than_the_latest() -> None:
    assert guessed([1, 2, 3, 4, 5, 6, 20, 8, 8, 4, 5, 6, 30, 9, 1, 2, 3, 4, 5, 6], 1) == [20]


def test_of_equal_matches_the_latest_counts() -> None:
    assert guessed([1, 2, 3, 20, 9, 1, 2, 3, 30, 8, 1, 2, 3], 1) == [30]


def test_nothing_is_guessed_where_nothing_repeats() -> None:
    assert guessed(list(range(300))) == []
    assert guessed([]) == guessed([1]) == []


def test_a_text_that_runs_in_circles_is_guessed_on() -> None:
    assert guessed([7, 8, 9, 7, 8, 9], 7) == [7, 8, 9, 7, 8, 9, 7]


@pytest.mark.parametrize("seed", range(5))
def test_a_text_is_guessed_alike_however_it_was_told(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 3, 1500).tolist()
    for length in (60, 333, 1500):
        told = [guessed(tokens[:length], 5, at_once=step) for step in (1, 2, 13, 100, 1 << 30)]
        assert told[0]
        assert all(one == told[0] for one in told)


def test_a_guess_is_always_what_some_earlier_match_says() -> None:
    """Whatever falls into one bucket."""
    tokens = np.random.default_rng(1).integers(0, 12, 4000).tolist()
    text, array = Text(), np.array(tokens, np.int32)
    found = 0
    for length in range(1, 4000):
        text.follow(array, length)
        guess = text.guess(array, 3)
        if guess:
            found += 1
            end = bytes(tokens[length - 2 : length])
            assert bytes([*end, guess[0]]) in bytes(tokens[:length])
    assert found > 1000


def test_a_token_more_costs_the_same_after_any_length() -> None:
    def cost(length: int) -> int:
        tokens = np.random.default_rng(0).integers(0, 50, length + 1).astype(np.int32)
        text = Text()
        text.follow(tokens, length)
        text.guess(tokens, 4)

        def one_more() -> None:
            text.follow(tokens, length + 1)
            text.guess(tokens, 4)

        return lines_run(one_more)

    assert cost(200_000) <= cost(200) * 1.5


def test_memory_is_bounded() -> None:
    text, _ = text_of(np.random.default_rng(0).integers(0, 50_000, 300_000).tolist())
    assert len(text._buckets) == MOST_BUCKETS
    assert len(text_of([1, 2, 3])[0]._buckets) == FIRST_BUCKETS


def test_the_end_of_a_text_beyond_all_buckets_is_still_matched() -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 300_000).tolist()
    assert guessed(tokens + tokens[-200:-100], 3) == tokens[-100:-97]


def test_trust_follows_what_came_though_nothing_was_computed() -> None:
    def after(tokens: list[int]) -> float:
        text, array = Text(), np.array(tokens, np.int32)
        for length in range(1, len(tokens)):
            text.follow(array, length)
            text.guess(array, 4)
        return text.trust

    random = np.random.default_rng(0)
    assert after([5, 6, 7, 8, 9] * 30) > 0.95
    assert after(random.integers(0, 4, 400).tolist()) < 0.6


# --- what is worth computing ---


def test_a_lone_row_guesses_far_and_a_crowd_only_what_is_sure() -> None:
    assert worth_computing([0.9], [11], WEIGHTS_WORTH)[0] >= 6
    assert sum(worth_computing([0.5] * 64, [11] * 64, WEIGHTS_WORTH)) == 0
    assert sum(worth_computing([0.98] * 64, [11] * 64, WEIGHTS_WORTH)) > 0
    assert worth_computing([0.02], [11], WEIGHTS_WORTH) == [0]


def test_where_tokens_cost_all_there_is_to_pay_nothing_is_guessed() -> None:
    assert worth_computing([0.99] * 4, [11] * 4, 0.0) == [0] * 4


def test_no_more_is_guessed_than_there_is_and_the_likelier_first() -> None:
    assert worth_computing([0.99, 0.99], [2, 0], 1000.0) == [2, 0]
    counts = worth_computing([0.95, 0.3], [11, 11], WEIGHTS_WORTH)
    assert counts[0] > counts[1]


def test_a_step_has_no_more_guesses_than_there_is_memory_for() -> None:
    counts = worth_computing([0.99] * 255 + [0.999], [64] * 256, 3000.0)
    assert sum(counts) == MOST_GUESSES
    assert counts[-1] > max(counts[:-1]), "the likeliest are not those that are left out"


def test_the_choice_gives_the_most_tokens_for_the_time_but_for_the_margin() -> None:
    random = np.random.default_rng(2)
    for _ in range(50):
        trusts, worth = random.uniform(0.05, 0.97, 2).tolist(), float(random.uniform(1, 40))

        def gain(counts: tuple[int, ...], trusts: list[float] = trusts, worth: float = worth) -> float:
            given = sum(1 + sum(p**i for i in range(1, n + 1)) for p, n in zip(trusts, counts, strict=True))
            return given / (worth + len(counts) + sum(counts))

        chosen = gain(tuple(worth_computing(trusts, [6, 6], worth)))
        best = max(gain((a, b)) for a in range(7) for b in range(7))
        assert best / 1.2 <= chosen <= best
        assert chosen >= gain((0, 0))


# --- in the engine ---


def played(changes: dict[str, Any], submits: list[dict[str, Any]], seconds: float = 0.01) -> Session:
    session = Session(limits(**changes))
    for wish in submits:
        session.submit(**wish)
    while session.engine.has_work:
        session.turn(seconds)
        assert session.engine.memory.imbalance() == 0
    invariants.check(session.engine)
    session.check_texts()
    return session


def decodes(session: Session) -> int:
    return sum(phase == "decode" for phase, _, _ in session.runner.log)


DULL: dict[str, Any] = {"prompt": [1, 2, 3, 4], "max_new": 60, "seed": DULL_SEED | 5}


@PAGES
def test_the_text_is_the_same_in_fewer_steps(page: int) -> None:
    wishes = [DULL | {"seed": DULL_SEED | seed} for seed in (5, 60, 7)] + [{"prompt": [9, 8, 7], "max_new": 40, "seed": 3}]
    plain = played({"page_size": page}, wishes)
    drafted = played({"page_size": page, "draft_tokens": MANY}, wishes)
    assert drafted.outputs == plain.outputs
    assert decodes(drafted) <= 0.8 * decodes(plain)
    assert drafted.engine._report.draft_tokens_accepted > 50


@PAGES
def test_a_stop_id_among_accepted_drafts_ends_the_text_there(page: int) -> None:
    """And only what was said is cached."""
    said = played({}, [DULL]).outputs[1]
    stop = next(token for token in said if said.index(token) >= 20)
    drafted = played({"page_size": page, "draft_tokens": MANY}, [DULL | {"stop_token_ids": (stop,)}])
    assert drafted.outputs[1] == said[: said.index(stop) + 1]
    assert drafted.finishes[1].code is FinishCode.STOP
    cached = 4 + len(drafted.outputs[1]) - 1
    assert drafted.engine.memory.prefixes.evictable == cached // page * page


@PAGES
def test_what_follows_a_drafted_text_finds_it_cached(page: int) -> None:
    session = played({"page_size": page, "draft_tokens": MANY}, [DULL])
    more = [*DULL["prompt"], *session.outputs[1], 5, 6]
    follow = session.submit(more, max_new=10, seed=DULL_SEED | 9)
    session.drain()
    session.check_texts()
    assert session.finishes[follow].cached_tokens == (len(more) - 3) // page * page


@pytest.mark.parametrize("max_new", range(1, 14))
def test_never_more_is_said_than_was_asked_for(max_new: int) -> None:
    session = played({"draft_tokens": 64}, [DULL | {"prompt": [5] * 20, "max_new": max_new}])
    assert len(session.outputs[1]) == max_new


def test_a_context_is_filled_to_its_end() -> None:
    session = played({"context_len": 64, "draft_tokens": 64}, [DULL | {"max_new": 60}])
    assert len(session.outputs[1]) == 60


def test_no_stop_id_is_said_too_early() -> None:
    """The dull token is a stop id: what is forbidden before so many tokens is drawn freely behind them."""
    wish = DULL | {"max_new": 40, "min_new_tokens": 25, "stop_token_ids": (6,)}
    wish["seed"] = DULL_SEED | next(seed for seed in range(1000) if (DULL_SEED | seed) % VOCAB == 6)
    plain, drafted = played({}, [wish]), played({"draft_tokens": MANY}, [wish])
    assert drafted.outputs == plain.outputs
    assert 25 <= len(drafted.outputs[1]) < 40


@pytest.mark.parametrize(
    "wish",
    [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}],
    ids=lambda wish: next(iter(wish)),
)
def test_requests_with_penalties_have_no_drafts(wish: dict[str, Any]) -> None:
    session = played({"draft_tokens": MANY}, [DULL | wish, DULL | {"prompt": [5, 6]}])
    alone = played({"draft_tokens": MANY}, [DULL | wish])
    assert alone.engine._report.draft_tokens == 0 < session.engine._report.draft_tokens
    assert decodes(alone) == 59


def test_requests_with_a_grammar_have_no_drafts_beside_others_that_have() -> None:
    session = Session(limits(draft_tokens=MANY), grammars=Grammars(lambda stop_ids: Counting(20, 30)))
    constrained = session.submit(**DULL, constraint=CONSTRAINT)
    free = session.submit(**(DULL | {"prompt": [5] * 10}))
    session.drain()
    assert session.outputs[constrained] == list(range(20, 50))
    assert session.outputs[free] == session.expected(free)
    assert session.engine._report.draft_tokens_accepted > 0


def test_scores_come_with_every_accepted_token() -> None:
    session = played({"draft_tokens": MANY}, [DULL | {"logprobs": LogprobRequest(2, 1, 1)}, DULL])
    assert session.engine._report.draft_tokens_accepted > 0
    assert all(score is not None for score in session.scores[1].output)


def test_what_is_said_before_a_failure_is_the_same() -> None:
    for seed in range(20):
        wish = DULL | {"seed": NAN_SEED | DULL_SEED | seed}
        plain, drafted = played({}, [wish]), played({"draft_tokens": MANY}, [wish])
        assert drafted.outputs == plain.outputs
        assert drafted.failures.keys() == plain.failures.keys()


@PAGES
def test_in_a_full_pool_nobody_leaves_for_drafts(page: int) -> None:
    """As many slots as the texts take, and no more: drafts use what is not needed yet, and are left out at the end."""
    wishes = [DULL | {"prompt": [seed] * 16, "max_new": 48, "seed": DULL_SEED | seed} for seed in (5, 6, 7, 8)]
    changes = {"page_size": page, "pool_tokens": 256, "radix": False, "conservativeness": 0.1}
    drafted = played(changes | {"draft_tokens": 12}, wishes)
    assert [finish.retractions for finish in drafted.finishes.values()] == [0] * 4
    assert drafted.engine._report.draft_tokens_accepted > 0


def test_retracted_requests_go_on_with_the_same_text() -> None:
    wishes = [DULL | {"prompt": [seed] * 4, "max_new": 90, "seed": DULL_SEED | seed} for seed in range(5, 13)]
    drafted = played({"pool_tokens": 200, "draft_tokens": MANY, "conservativeness": 0.1}, wishes)
    assert sum(finish.retractions for finish in drafted.finishes.values()) > 0
    assert drafted.engine._report.draft_tokens_accepted > 0


def test_an_abort_between_steps_gives_everything_back() -> None:
    session = Session(limits(draft_tokens=MANY))
    one, other = session.submit(**DULL), session.submit(**(DULL | {"prompt": [5, 6]}))
    while len(session.outputs[one]) < 10:
        session.turn()
    session.abort(one)
    session.drain()
    session.check_texts()
    assert session.finishes[one].code is FinishCode.ABORT
    assert len(session.outputs[other]) == 60
    invariants.check(session.engine)


def test_the_log_and_the_counters_tell_of_drafts() -> None:
    session = played({"draft_tokens": MANY, "decode_log_interval": 5}, [DULL])
    lines = [line for line in session.lines if line.startswith("Decode batch.")]
    assert lines
    lens = [float(line.split("accept len: ")[1].split(",")[0]) for line in lines]
    rates = [float(line.split("accept rate: ")[1].split(",")[0]) for line in lines]
    assert max(lens) > 1.5
    assert all(0 <= rate <= 1 for rate in rates)
    stats = session.stats[-1]
    report = session.engine._report
    assert stats.draft_tokens == report.draft_tokens >= stats.draft_tokens_accepted > 0
    assert stats.generation_tokens == 60
    assert 1 + decodes(session) + stats.draft_tokens_accepted >= 60
    assert "accept len" not in "".join(played({"decode_log_interval": 5}, [DULL]).lines)


def config(**changes: Any) -> ServerConfig:
    return ServerConfig(**({"model_path": "folder", "speculative_algorithm": "NGRAM"} | changes))


def test_the_options_decide_and_no_step_is_in_flight_while_guesses_are_made() -> None:
    info = FakeRunner(512).info
    cuda = replace(info, device="cuda:0")
    on, off = EngineLimits.of(config(), cuda), EngineLimits.of(config(speculative_algorithm=None), cuda)
    assert (on.draft_tokens, on.overlap) == (12, False)
    assert (off.draft_tokens, off.overlap) == (0, True)
    assert EngineLimits.of(config(speculative_num_draft_tokens=4), info).draft_tokens == 4


def test_a_runner_that_cannot_check_drafts_is_refused_at_the_start() -> None:
    info = FakeRunner(512).info
    lacking = replace(info, features=frozenset())
    with pytest.raises(ConfigError, match="--speculative-algorithm=NGRAM"):
        EngineLimits.of(config(), lacking)


def test_sizes_are_looked_up_longest_first() -> None:
    assert list(SIZES) == sorted(SIZES, reverse=True)
