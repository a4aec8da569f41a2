"""Schedules that SGLang 0.4.7 logged, replayed line by line."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.queue import WaitingQueue
from banyan_runtime.engine.request import Request
from banyan_runtime.engine.retraction import CLIP_MAX_NEW, NewTokenRatio
from banyan_runtime.engine.rules import SchedulingRules
from tests.unit.engine import invariants
from tests.unit.engine.replay import Replay
from tests.unit.engine.session import LOOPS


def sglang_limits(**changes: object) -> EngineLimits:
    values: dict[str, object] = {
        "context_len": 32_768, "pool_tokens": 20_480, "max_running": 200, "max_prefill_tokens": 16_384, "chunk": 8192,
        "policy": "fcfs",
    }  # fmt: skip
    return EngineLimits(**(values | changes))  # type: ignore[arg-type]


class SglangRules(SchedulingRules):
    """SGLang 0.4.7's: victims go last and are charged their full max_new_tokens; prefills always come before decodes."""

    def put_back(self, queue: WaitingQueue, victims: Sequence[Request]) -> None:
        for victim in victims:
            queue.append(victim)

    def charge(self, request: Request) -> int:
        return min(request.max_new, CLIP_MAX_NEW)

    def decodes_between(self, worth: bool) -> int:
        return 0

    def left_to_others(self, piece: int) -> int:
        return 0


SGLANG = SglangRules()


def own(number: int, count: int) -> list[int]:
    """`count` tokens that no other number shares a prefix with."""
    return [10_000 + number] * count


@LOOPS
def test_a_tokens_of_decode_lines_count_what_is_computed(overlap: bool) -> None:
    replay = Replay(sglang_limits(overlap=overlap), SGLANG)
    for number, (prompt, max_new) in enumerate([(6, 8), (37, 39), (54, 128), (34, 38)]):
        replay.submit(own(number, prompt), max_new)
        replay.drain()
    decodes = [line for line in replay.lines if line.startswith("D")]
    expected = [70, 88, 128, 168, 60] if overlap else [70, 89, 129, 169, 62]
    assert decodes == [f"D 1/{tokens}" for tokens in expected]


def replay_b(limits: EngineLimits, rules: SchedulingRules = SGLANG) -> Replay:
    replay = Replay(limits, rules)
    for number in range(32):
        replay.submit([1, 2, 3, 4, 5, *own(number, 30)])
    replay.turn()
    for number in range(32, 1000):
        replay.submit([1, 2, 3, 4, 5, *own(number, 30)])
    replay.drain()
    return replay


def test_b_admission_and_retraction_in_the_normal_loop() -> None:
    replay = replay_b(sglang_limits())
    assert replay.lines[:11] == [
        "P 32/1120/0/0.00/0/0",
        "P 105/3150/525/0.05/32/863",
        "D 137/9595",
        "D 137/15075",
        "R 16 0.5806 → 1.0000",
        "D 121/18155",
        "P 9/270/45/0.89/121/870",
        "P 120/3600/600/0.02/9/750",
        "D 129/8075",
        "D 129/13235",
        "D 129/18395",
    ]
    assert replay.runner.counts == {"prefill": 16, "decode": 1023}
    assert (replay.runner.prefilled, replay.cached) == (32_560, 4_920)
    assert sum(line.startswith("R") for line in replay.lines) == 1
    check_end(replay)


def test_b_admission_and_retraction_with_overlap() -> None:
    replay = replay_b(sglang_limits(overlap=True))
    assert replay.lines[:11] == [
        "P 32/1120/0/0.00/0/0",
        "P 101/3535/0/0.05/32/867",
        "D 133/9448",
        "D 133/14768",
        "D 133/20088",
        "R 15 0.5766 → 1.0000",
        "P 11/330/55/0.89/118/871",
        "P 118/3540/590/0.02/11/753",
        "D 129/8058",
        "D 129/13218",
        "D 129/18378",
    ]
    assert replay.runner.counts == {"prefill": 16, "decode": 1031}
    assert (replay.runner.prefilled, replay.cached) == (32_960, 4_410)
    assert sum(line.startswith("R") for line in replay.lines) == 1
    check_end(replay)


def check_end(replay: Replay) -> None:
    memory = replay.engine.memory
    assert memory.available == 20_480
    assert memory.prefixes.protected == 0
    assert len(replay.done) == 1000
    invariants.check(replay.engine)


def test_b_with_victims_at_the_front_and_charged_in_full() -> None:
    class Charging(SglangRules):
        put_back = SchedulingRules.put_back

    replay = replay_b(sglang_limits(), Charging())
    assert replay.lines[4:7] == ["R 16 0.5806 → 1.0000", "D 121/18155", "P 5/750/25/0.89/121/874"]
    check_end(replay)


@LOOPS
def test_b_with_victims_at_the_front_delays_none_of_them_long(overlap: bool) -> None:
    replay = replay_b(sglang_limits(overlap=overlap), SchedulingRules())
    check_end(replay)
    order = [id for id, _ in sorted(replay.done.items(), key=lambda item: item[1][0])]
    victims = [id for id, (_, retractions) in replay.done.items() if retractions]
    assert victims
    # a victim ends with the wave that it belonged to or the next one, not behind the thousand of its time
    assert max(order.index(id) - id for id in victims) < 2 * 137


def test_c_without_retraction_the_ratio_starts_anew_with_each_wave() -> None:
    replay = Replay(sglang_limits(), SGLANG)
    for number in range(1000):
        replay.submit([1, 2, 3, 4, 5, *own(number, 30)])
    ratios = []
    while replay.engine.has_work:
        before = replay.engine.scheduler.ratio.value
        prefills = replay.runner.counts["prefill"]
        replay.turn()
        if replay.runner.counts["prefill"] > prefills:
            ratios.append(f"{before:.4f}")
    assert replay.lines[:5] == ["P 125/4375/0/0.00/0/875", "D 125/8755", "D 125/13755", "D 125/18755", "P 129/3870/645/0.00/0/746"]
    assert set(ratios) == {"0.7000"}
    assert replay.runner.counts == {"prefill": 8, "decode": 1016}
    assert (replay.runner.prefilled, replay.cached) == (30_625, 4_375)
    check_end(replay)


def test_c_with_overlap_is_never_idle_between_waves() -> None:
    replay = Replay(sglang_limits(overlap=True), SGLANG)
    for number in range(1000):
        replay.submit([1, 2, 3, 4, 5, *own(number, 30)])
    while replay.runner.counts["prefill"] < 2:
        ratio = replay.engine.scheduler.ratio.value
        replay.turn()
    assert replay.lines == ["P 125/4375/0/0.00/0/875", "D 125/8880", "D 125/13880", "D 125/18880", "P 129/3870/645/0.00/0/746"]
    assert f"{ratio:.4f}" == "0.5716"
    assert replay.runner.counts["decode"] == 128
    replay.drain()
    assert replay.runner.counts == {"prefill": 8, "decode": 1024}
    check_end(replay)


@LOOPS
def test_d_a_chunk_ends_inside_a_prompt_and_goes_on_in_the_next_step(overlap: bool) -> None:
    replay = Replay(sglang_limits(pool_tokens=200_000, max_running=1000, overlap=overlap), SGLANG)
    common = list(range(100, 125))
    replay.submit([*common, 7], 1)
    replay.drain()
    replay.take()
    for number in range(274 + 91):
        replay.submit([*common, *own(number, 30)], 128)
    replay.turn()
    replay.turn()
    first, second = replay.take()[:2]
    assert first.startswith("P 274/8192/6850/")
    assert second.startswith("P 92/2758/2275/")
    replay.drain()


def test_e_a_hundred_requests_grow_by_a_hundred_tokens_a_step() -> None:
    replay = Replay(sglang_limits(pool_tokens=200_000), SGLANG)
    common = list(range(100, 125))
    replay.submit([*common, *own(5000, 30)], 20)
    replay.drain()
    replay.take()
    for number in range(100):
        replay.submit([*common, *own(number, 30)], 500)
    replay.drain()
    lines = [line for line in replay.take() if line.startswith("D 100/")]
    assert lines == [f"D 100/{tokens}" for tokens in range(5125, 49_126 + 1, 4000)]


def tutorial_prompt(number: int) -> list[int]:
    """3 fixed tokens, one for each decimal digit, 29 fixed ones."""
    return [1, 2, 3, *(100 + int(digit) for digit in str(number)), *range(200, 229)]


def warmed_up(limits: EngineLimits) -> Replay:
    replay = Replay(limits, SGLANG)
    for number in range(20):
        replay.submit(tutorial_prompt(number), 4)
        replay.drain()
    replay.take()
    return replay


def test_the_log_of_june_its_first_two_prefill_lines() -> None:
    replay = warmed_up(sglang_limits(overlap=True))
    for number in range(32):
        replay.submit(tutorial_prompt(number))
    replay.turn()
    for number in range(32, 5000):
        replay.submit(tutorial_prompt(number))
    replay.turn()
    assert replay.take() == ["P 32/380/698/0.03/0/0", "P 105/3150/457/0.05/32/4863"]


def test_the_log_of_may_its_first_two_prefill_lines() -> None:
    replay = warmed_up(sglang_limits(overlap=True))
    for number in range(8):
        replay.submit(tutorial_prompt(number))
    replay.turn()
    for number in range(8, 207):
        replay.submit(tutorial_prompt(number))
    replay.turn()
    assert replay.take() == ["P 8/8/256/0.01/0/0", "P 123/3342/869/0.03/8/76"]


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize(
    ("first", "total", "stops", "seen", "decodes"),
    [
        (32, 5000, 1, ("24", "0.29", "136"), [13, 14, 15]),
        (32, 5000, 2, ("25", "0.28", "135"), [11, 12, 13, 14]),
        (8, 2000, 3, ("30", "0.27", "128"), [12, 13, 14]),
    ],
    ids=["S0", "S2", "S1"],
)
def test_the_logs_third_prefill_line_when_some_stop_early(
    first: int, total: int, stops: int, seen: tuple[str, str, str], decodes: list[int]
) -> None:
    matching: dict[int, str] = {}  # usage by the number of decodes before the line
    for stop_in in range(7, 16):
        replay = warmed_up(sglang_limits(overlap=True))
        for number in range(first):
            replay.submit(tutorial_prompt(number))
        replay.turn()
        for number in range(first, total):
            replay.submit(tutorial_prompt(number))
        before = replay.runner.counts["decode"]
        replay.runner.stop_in, replay.runner.stop_rows = before + stop_in, stops
        while replay.runner.counts["prefill"] < 20 + 3:
            replay.turn()
        third = [line for line in replay.lines if line.startswith("P")][2]
        new, _, _, usage, running, _ = third.removeprefix("P ").split("/")
        if (new, running) == (seen[0], seen[2]):
            matching[replay.runner.counts["decode"] - before] = usage
    assert set(decodes) <= set(matching), "the count holds wherever the logged usage is possible"
    assert seen[1] in [matching[decode] for decode in decodes]


def decayed(steps: int, start: float = 0.7) -> float:
    ratio = NewTokenRatio(1.0)
    ratio.value = start
    for _ in range(steps):
        ratio.decay()
    return ratio.value


@pytest.mark.parametrize(
    ("decays", "old", "outputs", "survivors", "new"),
    [
        (102, "0.5977", 13_714, 135, "0.9499"),
        (100, "0.5997", 13_518, 137, "0.9271"),
        (101, "0.5987", 13_407, 133, "0.9438"),
    ],
    ids=["S0", "S1", "S2"],
)
def test_the_logs_ratio_lines_follow_from_the_decays_and_the_survivors(
    decays: int, old: str, outputs: int, survivors: int, new: str
) -> None:
    ratio = NewTokenRatio(1.0)
    for _ in range(decays):
        ratio.decay()
    assert f"{ratio.value:.4f}" == old
    ratio.learn(outputs, survivors, 128 * survivors)
    assert f"{ratio.value:.4f}" == new


def test_the_logs_later_ratio_lines_decay_from_where_the_last_retraction_left_it() -> None:
    after_first = (13_714 + 20 * 135) / (128 * 135)
    assert f"{decayed(19, after_first):.4f}" == "0.9308"
    assert f"{decayed(254, 1.0):.4f}" == "0.7452"
    assert f"{decayed(377, 1.0):.4f}" == "0.6217"
    assert f"{decayed(19, (13_518 + 20 * 137) / (128 * 137)):.4f}" == "0.9081"
    assert f"{decayed(22, (13_407 + 20 * 133) / (128 * 133)):.4f}" == "0.9217"


def test_the_ratio_falls_to_its_minimum_in_600_decode_steps_and_no_further() -> None:
    assert decayed(600) == pytest.approx(0.098)
    assert decayed(5000) == pytest.approx(0.098)
