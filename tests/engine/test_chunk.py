from __future__ import annotations

from itertools import pairwise

import pytest

from banyan_runtime.engine.chunk import SMALLEST_CHUNK, Chunk
from banyan_runtime.step import Step
from tests.engine.fake import FakeHandle
from tests.engine.session import Session, limits


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
    chunk = Chunk(2048, 1, 2.0)
    chunk.learn(256, 1.0, 256)
    chunk.learn(10, 0.001, 256)
    assert chunk.size == 256
    chunk.learn(256, 0.9, 256)
    assert chunk.size == 512


@pytest.mark.parametrize(("page", "least"), [(1, 256), (16, 256), (48, 288)])
def test_the_chunk_has_a_floor_of_whole_pages(page: int, least: int) -> None:
    chunk = Chunk(960, page, 2.0)
    for _ in range(5):
        chunk.learn(960, 1e6, chunk.size)
    assert chunk.size == least >= SMALLEST_CHUNK


def test_a_chunk_that_was_asked_to_be_smaller_than_the_floor_stays_as_it_was_asked() -> None:
    chunk = Chunk(16, 1, 2.0)
    chunk.learn(16, 100.0, 16)
    assert chunk.size == 16


@pytest.mark.parametrize(("most", "target"), [(None, 2.0), (512, 0.0)])
def test_without_chunks_or_without_a_target_nothing_changes(most: int | None, target: float) -> None:
    chunk = Chunk(most, 1, target)
    chunk.learn(500, 1000.0, most)
    assert chunk.size == most
