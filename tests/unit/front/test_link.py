"""Front and engine's connection: messages arrive whole, in order and once, and neither end waits for the other."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan_runtime.link import Link


@pytest.fixture
def ends() -> tuple[Link, Link]:
    one, other = socket.socketpair()
    return Link(one), Link(other)


def received(link: Link, number: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < number and not link.ended:
        found += link.receive()
    return found


def test_messages_of_all_sizes_arrive_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    dice = random.Random(1)
    sizes = [0, 1, 3, 4, 5, 262_139, 262_140, 262_141, 262_144, 3 << 20, *(dice.randrange(2000) for _ in range(500))]
    messages = [dice.randbytes(size) for size in sizes]

    def say() -> None:
        for message in messages:
            ends[0].send(message)
        while ends[0].unsent:
            ends[0].wait_for_room()

    speaker = threading.Thread(target=say)
    speaker.start()
    assert received(ends[1], len(messages)) == messages
    speaker.join()
    assert ends[1].receive() == []


def test_who_is_not_read_keeps_its_messages_and_does_not_wait(ends: tuple[Link, Link]) -> None:
    messages = [bytes([index % 256]) * 1000 for index in range(5000)]
    for message in messages:
        ends[0].send(message)
    assert ends[0].unsent > 0
    found: list[bytes] = []
    while len(found) < len(messages):
        found += ends[1].receive()
        ends[0].flush()
    assert found == messages
    assert ends[0].unsent == 0


def test_one_that_is_closed_gives_its_last_words_first(ends: tuple[Link, Link]) -> None:
    ends[0].send(b"last")
    ends[0].close()
    assert ends[1].receive() == [b"last"]
    assert not ends[1].ended
    assert ends[1].receive() == []
    assert ends[1].ended
    ends[1].send(b"to nobody")
    assert ends[1].unsent == 0


def test_last_words_are_heard_by_who_spoke_to_nobody_meanwhile(ends: tuple[Link, Link]) -> None:
    ends[0].send(b"last")
    ends[0].close()
    ends[1].send(b"to nobody")
    assert (ends[1].unsent, ends[1].ended) == (0, False)
    assert ends[1].receive() == [b"last"]
    assert ends[1].receive() == []
    assert ends[1].ended


def test_a_message_cut_short_by_the_end_is_no_message(ends: tuple[Link, Link]) -> None:
    one, other = socket.socketpair()
    link = Link(other)
    one.send(b"\x05\x00\x00\x00abc")
    one.close()
    assert link.receive() == []
    assert link.receive() == []
    assert link.ended


def test_to_close_waits_for_who_reads_late_as_long_as_it_is_told(ends: tuple[Link, Link]) -> None:
    ends[0].send(bytes(4 << 20))
    reader = threading.Thread(target=lambda: received(ends[1], 1))
    reader.start()
    ends[0].close(10.0)
    reader.join(10.0)
    assert not reader.is_alive()
    assert not ends[1].ended


def test_to_close_gives_up_on_who_does_not_read(ends: tuple[Link, Link]) -> None:
    ends[0].send(bytes(4 << 20))
    ends[0].close(0.05)
    found = received(ends[1], 1)
    assert (found, ends[1].ended) == ([], True)


def pipe_that_holds(word: bytes) -> int:
    """The end of a pipe from which this can be read."""
    ours, theirs = os.pipe()
    os.write(theirs, word)
    os.close(theirs)
    return ours


def held(descriptor: int | None) -> bytes:
    assert descriptor is not None
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def open_ones() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextlib.contextmanager
def no_room_for_descriptors() -> Iterator[None]:
    probe = os.dup(0)
    os.close(probe)  # the lowest free number
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_come_with_their_messages_however_long_these_wait(ends: tuple[Link, Link]) -> None:
    dice = random.Random(2)
    with_one = [dice.random() < 0.3 for _ in range(400)]
    messages = [(b"with %d " if given else b"alone %d ") % at + bytes(dice.randrange(9000)) for at, given in enumerate(with_one)]
    before = open_ones()
    for at, (message, given) in enumerate(zip(messages, with_one, strict=True)):
        assert ends[0].send(message, pipe_that_holds(b"%d" % at) if given else None)
    assert ends[0].unsent > 0
    seen = 0
    while seen < len(messages):
        for message in ends[1].receive():
            assert message == messages[seen]
            if with_one[seen]:
                assert held(ends[1].descriptor()) == b"%d" % seen
            seen += 1
        ends[0].flush()
    assert open_ones() == before


def test_a_descriptor_that_there_is_no_room_for_is_missed_by_its_own_message_alone(ends: tuple[Link, Link]) -> None:
    long = bytes(400_000)  # read in pieces
    ends[0].send(long, pipe_that_holds(b"one"))
    with no_room_for_descriptors():
        assert ends[1].receive() == []
    ends[0].flush()
    while ends[0].unsent:
        ends[1].receive()
        ends[0].flush()
    ends[0].send(b"two", pipe_that_holds(b"two"))
    found: list[bytes] = []
    while b"two" not in found:
        found += ends[1].receive()
    assert ends[1].descriptor() is None
    assert held(ends[1].descriptor()) == b"two"


def test_a_descriptor_that_nobody_can_be_sent_stays_the_senders(ends: tuple[Link, Link]) -> None:
    ends[1].close()
    given = pipe_that_holds(b"mine")
    assert not ends[0].send(b"x", given)
    assert not ends[0].send(b"x", given)
    assert held(given) == b"mine"


def test_descriptors_that_are_kept_are_closed_with_the_link(ends: tuple[Link, Link]) -> None:
    before = open_ones()
    for _ in range(300):
        ends[0].send(bytes(5000), pipe_that_holds(b"kept"))
    assert ends[0].unsent > 0
    ends[1].receive()
    ends[0].close()
    ends[1].close()
    assert open_ones() == before - 2
