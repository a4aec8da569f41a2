"""Waiting for a storage: how long, with which words, and how it ends."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

import pytest

from banyan_runtime.storage.patience import Patience, Wait
from banyan_runtime.storage.store import Full, NotFound, Stopped, Throttled, Unreachable

WHERE = "the storage at http://s3"
AWAY = Unreachable("s3://b/x", "did not answer", reason="connection refused")
FULL = Full("", "no space left on device")


def test_a_call_is_repeated_until_it_is_answered() -> None:
    failures = [AWAY, Throttled("s3://b/x", "slow down"), AWAY]

    def call(_: Wait) -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert Patience(60).retry(WHERE, call) == "answer"


def test_what_another_try_cannot_mend_is_not_repeated() -> None:
    calls = []

    def call(_: Wait) -> None:
        calls.append(1)
        raise NotFound("s3://b/x", "no such object")

    with pytest.raises(NotFound):
        Patience(60).retry(WHERE, call)
    assert len(calls) == 1


def test_a_storage_without_a_sign_of_life_is_given_up_after_the_limit() -> None:
    calls = []

    def call(wait: Wait) -> None:
        calls.append(1)
        wait.since -= 31  # as if the call had taken so long
        raise AWAY

    with pytest.raises(Unreachable):
        Patience(60).retry(WHERE, call)
    assert len(calls) == 2


def test_a_storage_that_sends_bytes_is_slow_and_not_away() -> None:
    calls = []

    def call(wait: Wait) -> None:
        calls.append(1)
        wait.since -= 61
        if len(calls) < 4:
            wait.progress()
        raise AWAY

    with pytest.raises(Unreachable):
        Patience(60).retry(WHERE, call)
    assert len(calls) == 4


def test_a_stop_ends_the_wait_at_once() -> None:
    stop = threading.Event()

    def call(_: Wait) -> None:
        stop.set()
        raise AWAY

    with pytest.raises(Stopped, match=AWAY.reason):
        Patience(1e6, stop=stop).retry(WHERE, call)


def test_a_call_that_blocks_is_told_of_and_so_is_its_answer() -> None:
    told = queue.Queue[str]()
    patience = Patience(60, told.put, first_notice_s=0.05)
    answer = threading.Event()
    thread = threading.Thread(target=lambda: patience.retry(WHERE, lambda _: answer.wait(60)))
    thread.start()
    assert WHERE in (waiting := told.get(timeout=20))
    answer.set()
    thread.join()
    assert WHERE in (again := told.get(timeout=20))
    assert again != waiting


def test_the_words_say_why_and_are_repeated() -> None:
    told = queue.Queue[str]()
    stop = threading.Event()
    patience = Patience(1e6, told.put, stop, first_notice_s=0.3, next_notice_s=0.05)

    def wait() -> None:
        with contextlib.suppress(Stopped):
            patience.retry(WHERE, _away)

    thread = threading.Thread(target=wait)
    thread.start()
    last = [told.get(timeout=20) for _ in range(3)][-1]
    assert WHERE in last
    assert AWAY.reason in last
    stop.set()
    thread.join()


def _full(_: Wait) -> None:
    raise FULL


def test_a_full_disk_has_no_room_again_because_reads_are_answered() -> None:
    told = queue.Queue[str]()
    patience = Patience(60, told.put, first_notice_s=0.05, next_notice_s=0.05)
    room = threading.Event()

    def write(_: Wait) -> None:
        if not room.is_set():
            _full(_)

    thread = threading.Thread(target=patience.retry, args=(WHERE, write))
    thread.start()
    for _ in range(3):
        assert FULL.reason in told.get(timeout=20)
        patience.retry(WHERE, lambda _: None)
    room.set()
    thread.join()
    words = iter(lambda: told.get(timeout=20), None)
    assert WHERE in next(text for text in words if FULL.reason not in text)


def test_that_there_is_room_again_is_told_whatever_came_between() -> None:
    told = queue.Queue[str]()
    patience = Patience(60, told.put, first_notice_s=0.05, next_notice_s=600)
    seen = threading.Event()
    failures = iter([_full, _away])

    def write(wait: Wait) -> None:
        if seen.is_set() and (fail := next(failures, None)) is not None:
            fail(wait)
        elif not seen.is_set():
            _full(wait)

    thread = threading.Thread(target=patience.retry, args=(WHERE, write))
    thread.start()
    assert FULL.reason in told.get(timeout=20)
    seen.set()
    thread.join()
    assert "room" in told.get(timeout=20)


def test_a_disk_that_stays_full_is_never_said_to_have_room() -> None:
    told = queue.Queue[str]()
    patience = Patience(1, told.put, first_notice_s=0.05)
    with pytest.raises(Full):
        patience.retry(WHERE, _full)
    patience.retry(WHERE, lambda _: None)
    time.sleep(0.2)
    assert all(FULL.reason in told.get() for _ in range(told.qsize()))


def test_calls_that_wait_for_one_storage_are_told_as_one() -> None:
    told = queue.Queue[str]()
    patience = Patience(60, told.put, first_notice_s=0.2, next_notice_s=600)
    answer, begun, start = threading.Event(), threading.Barrier(9), time.monotonic()

    def call(wait: Wait) -> None:
        wait.since = start  # on a slow machine they would begin apart, and the last be no long wait when the first is over
        begun.wait()
        answer.wait(60)

    threads = [threading.Thread(target=patience.retry, args=(WHERE, call)) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait()
    told.get(timeout=20)
    answer.set()
    for thread in threads:
        thread.join()
    assert WHERE in told.get(timeout=20)
    assert told.empty()


def test_of_calls_that_are_answered_in_time_nothing_is_told() -> None:
    told: list[str] = []
    patience = Patience(60, told.append)
    for _ in range(1000):
        patience.retry(WHERE, lambda _: None)
    assert told == []


def _away(_: Wait) -> None:
    raise AWAY
