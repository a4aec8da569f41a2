"""Which stored responses give way: a decision without storage or clock."""

from __future__ import annotations

import random

from banyan_runtime.front.openai.responses.quota import BLOCK_BYTES, KEPT_PART, LOOKS, Quota, Stored, taken


def stored(number: int, size: int = BLOCK_BYTES) -> list[Stored]:
    """In no order, as a bucket may list them."""
    every = [Stored(str(made), f"responses/{made}.json", made, size) for made in range(number)]
    random.Random(number).shuffle(every)
    return every


def looked(quota: Quota, there: list[Stored], size: int, live: frozenset[str] = frozenset()) -> list[Stored]:
    """What stays."""
    leaving = quota.leaving(there, 0, live, size)
    quota.looked(leaving.left, quota.settled, size)
    return [one for one in there if one not in leaving.pushed and one not in leaving.old]


def test_the_oldest_give_way_and_some_more_so_that_not_each_response_makes_all_be_looked_at() -> None:
    quota, there = Quota(100 * BLOCK_BYTES), stored(100)
    leaving = quota.leaving(there, 0, frozenset(), 1)
    assert [one.made for one in leaving.pushed] == list(range(10))
    assert leaving.left == 100 * BLOCK_BYTES * KEPT_PART
    assert quota.leaving(stored(99), 0, frozenset(), 1).pushed == ()


def test_what_was_kept_long_enough_goes_whatever_room_there_is() -> None:
    for most in (None, 100 * BLOCK_BYTES):
        leaving = Quota(most).leaving(stored(50), 20, frozenset(), 0)
        assert [one.made for one in leaving.old] == list(range(20))
        assert (leaving.pushed, leaving.left) == ((), 30 * BLOCK_BYTES)


def test_what_runs_here_is_not_pushed_aside() -> None:
    quota = Quota(10 * BLOCK_BYTES)
    leaving = quota.leaving(stored(10), 0, frozenset({"0", "2"}), 1)
    assert [one.made for one in leaving.pushed] == [1]
    everything = frozenset(map(str, range(10)))
    assert quota.leaving(stored(10), 0, everything, 1).pushed == ()


def test_small_files_count_as_the_blocks_that_they_take() -> None:
    assert [taken(size) for size in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1)] == [0, BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES]
    assert len(Quota(100 * BLOCK_BYTES).leaving(stored(1000, size=1), 0, frozenset(), 0).pushed) == 910


def test_nobody_gives_way_to_what_never_fits() -> None:
    quota = Quota(10 * BLOCK_BYTES)
    assert len(looked(quota, stored(5), 11 * BLOCK_BYTES)) == 5
    assert not quota.take(11 * BLOCK_BYTES)


def test_nothing_is_given_before_a_look_and_anything_where_there_is_no_bound() -> None:
    assert not Quota(1 << 30).take(1)
    assert Quota(None).take(1 << 40)


def test_a_server_looks_again_now_and_then_for_others_write_there_too() -> None:
    quota = Quota(80 * BLOCK_BYTES)
    looked(quota, [], 1)
    given = 0
    while quota.take(1):
        given += 1
    assert given == 80 / LOOKS


def test_what_is_given_during_a_look_counts() -> None:
    quota = Quota(80 * BLOCK_BYTES)
    looked(quota, [], 1)
    settled = quota.settled
    assert quota.take(9 * BLOCK_BYTES)
    quota.settle(9 * BLOCK_BYTES)
    quota.looked(0, settled, 1)
    assert (quota.take(1), quota.take(1)) == (True, False)


def test_what_was_on_the_way_when_a_look_began_counts_though_the_look_may_not_have_seen_it() -> None:
    quota = Quota(10 * BLOCK_BYTES)
    looked(quota, stored(9), 1)
    assert quota.take(1)
    leaving = quota.leaving(stored(9), 0, frozenset(), 1, quota.on_the_way)
    assert [one.made for one in leaving.pushed] == [0], "nine, one on the way and one more are eleven"
    quota.looked(leaving.left, quota.settled, 1)
    assert (quota.take(1), quota.take(1)) == (True, False)


def test_one_on_the_way_does_not_keep_the_next_from_the_room_that_a_look_made_for_it() -> None:
    quota = Quota(8 * BLOCK_BYTES)
    looked(quota, [], 1)
    assert quota.take(1)
    assert not quota.take(1)
    looked(quota, [], 1)
    assert quota.take(1)


def test_however_much_is_written_and_by_how_many_the_bound_holds() -> None:
    drawn = random.Random(5)
    most, there, made = 200 * BLOCK_BYTES, list[Stored](), 0
    servers = [Quota(most) for _ in range(3)]
    for _ in range(2000):
        quota, size, made = drawn.choice(servers), drawn.randrange(1, 5 * BLOCK_BYTES), made + 1
        if not quota.take(size):
            there = looked(quota, there, size)
            assert quota.take(size)
        quota.settle(size)
        there.append(Stored(str(made), str(made), made, size))
        assert sum(one.taken for one in there) <= most + most * len(servers) / LOOKS
    assert min(one.made for one in there) > 1800, "the youngest are there"
