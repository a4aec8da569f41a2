"""Front and engine's connection: messages arrive whole, in order and once, and neither end waits for the other."""

from __future__ import annotations

import random
import socket
import threading

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
