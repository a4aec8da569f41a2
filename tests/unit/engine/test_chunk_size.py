from __future__ import annotations

from itertools import pairwise

import pytest

from banyan_runtime.engine.chunk_size import SMALLEST_CHUNK, ChunkSize
from banyan_runtime.step import Step
from tests.unit.engine.fake import FakeHandle
from tests.unit.engine.session import Session, limits


class Device:
    """Prefill steps cost a tenth of a second and so much for each token, on the session's clock."""

    def __init__(self, session: Session, seconds_a_token: float) -> None:
        self.seconds_a_token = seconds_a_token
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        launch = session.runner.launch

        def timed(step: Step) -> FakeHandle:
            if step.mode == "prefill":
                self.tokens.append(len(step.token_ids))
                self.seconds.append(0.1 + len(step.token_ids) * self.seconds_a_token)
                session.now += self.seconds[-1]
            return launch(step)

        session.runner.launch = timed  # type: ignore[method-assign]


def slow_session(seconds_a_token: float, **changes: object) -> tuple[Session, Device]:
    session = Session(limits(**({"context_len": 8192, "pool_tokens": 8192, "chunk": 2048, "prefill_step_s": 2.0} | changes)))
    return session, Device(session, seconds_a_token)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_on_a_slow_device_prompts_are_cut_so_that_steps_meet_the_target(page: int, overlap: bool) -> None:
    """From the first one on."""
    session, device = slow_session(0.003, page_size=page, overlap=overlap)
    session.submit([token % 50 for token in range(6000)], 5)
    session.drain()
    assert max(device.seconds) <= 2.5
    assert max(device.tokens) > 400
    assert all(tokens % page == 0 for tokens in device.tokens[:-1])
    assert len(session.outputs[1]) == 5
    session.check_texts()


def test_many_short_prompts_in_one_step_count_as_their_sum() -> None:
    session, device = slow_session(0.004)
    session.submit([49] * 1000, 1)
    session.drain()
    for number in range(14):
        session.submit([number] * 100, 1)
    session.drain()
    assert max(device.seconds) <= 2.5
    assert sum(device.tokens) == 1000 + 14 * 100


def test_the_chunk_grows_again_by_doubling_when_the_device_gets_fast() -> None:
    session, device = slow_session(0.007)
    session.submit([1] * 1000, 1)
    session.drain()
    device.seconds_a_token, first = 0.00001, len(device.tokens)
    session.submit([2] * 7000, 1)
    session.drain()
    grown = device.tokens[first:]
    assert grown[0] < 300
    assert all(after <= 2 * before for before, after in pairwise(grown))
    assert max(grown) == 2048


def test_a_step_that_was_short_for_want_of_prompts_does_not_let_the_chunk_grow() -> None:
    chunk = ChunkSize(2048, 1, 2.0)
    chunk.learn(256, 1.0, 256)
    chunk.learn(10, 0.001, 256)
    assert chunk.size == 256
    chunk.learn(256, 0.9, 256)
    assert chunk.size == 512


@pytest.mark.parametrize(("page", "least"), [(1, 256), (16, 256), (48, 288)])
def test_the_chunk_has_a_floor_of_whole_pages(page: int, least: int) -> None:
    chunk = ChunkSize(960, page, 2.0)
    for _ in range(5):
        chunk.learn(960, 1e6, chunk.size)
    assert chunk.size == least >= SMALLEST_CHUNK


def test_a_chunk_that_was_asked_to_be_smaller_than_the_floor_stays_as_it_was_asked() -> None:
    chunk = ChunkSize(16, 1, 2.0)
    chunk.learn(16, 100.0, 16)
    assert chunk.size == 16


@pytest.mark.parametrize(("most", "target"), [(None, 2.0), (512, 0.0)])
def test_without_chunks_or_without_a_target_nothing_changes(most: int | None, target: float) -> None:
    chunk = ChunkSize(most, 1, target)
    chunk.learn(500, 1000.0, most)
    assert chunk.size == most


# --- beside a long prompt ---


def beside_a_long_one(lengths: list[int], page: int = 1, overlap: bool = False) -> list[int]:
    """A prompt of ten pieces, and others behind it: the prefill steps until each of them says something, the long one's first."""
    settings = {"pool_tokens": 2048, "chunk": 64, "page_size": page, "overlap": overlap}
    session = Session(limits(**settings))
    asked = [session.submit([token % 50 for token in range(640)], 3)]
    session.turn()
    asked += [session.submit([number % 50] + [49] * (length - 1), 2) for number, length in enumerate(lengths)]
    steps: dict[int, int] = {}
    while len(steps) < len(asked):
        session.turn()
        for id in session.started:
            steps.setdefault(id, session.engine.scheduler.prefill.batches)
    session.drain()
    session.check_texts()
    return [steps[id] for id in asked]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_short_prompts_do_not_wait_until_a_long_one_is_computed(page: int, overlap: bool) -> None:
    alone = beside_a_long_one([], page, overlap)[0]
    long, *short = beside_a_long_one([10, 12], page, overlap)
    assert max(short) <= 4
    assert long <= alone + 1


def test_one_that_needs_more_waits_its_turn_and_is_not_overtaken() -> None:
    long, middle, short = beside_a_long_one([40, 10])
    assert long <= middle <= short


def test_short_ones_that_come_and_come_take_half_of_a_long_one_at_most() -> None:
    alone, long = (beside_a_long_one(lengths)[0] for lengths in ([], [30] * 60))
    assert alone < long <= 2 * alone + 1


def test_lower_ones_have_nothing_of_an_urgent_prompt() -> None:
    session = Session(limits(pool_tokens=8192, max_running=256, chunk=64))
    urgent = session.submit([token % 50 for token in range(640)], 3, priority=5)
    session.turn()
    lower = [session.submit([number % 50] + [49] * 9, 2) for number in range(40)]
    session.drain()
    assert session.started.index(urgent) < min(map(session.started.index, lower))
    session.check_texts()


def test_who_is_let_by_leaves_the_long_one_its_room() -> None:
    """Without that they would take what its rest needs, and be sent back for it."""
    session = Session(limits(pool_tokens=2048, max_running=64, chunk=64))
    session.submit([token % 50 for token in range(1600)], 3)
    session.turn()
    short = [session.submit([number % 50] + [49] * 9, 60) for number in range(24)]
    session.drain()
    assert sum(session.finishes[id].retractions for id in short) == 0
    session.check_texts()
