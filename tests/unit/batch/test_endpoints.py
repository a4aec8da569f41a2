"""Which of a server's addresses a line goes to."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from banyan_runtime.batch.endpoints import EJECT_S, RESOLVE_S, Balancer, Endpoints

PODS = [f"10.0.0.{n}" for n in range(1, 5)]


def lines(balancer: Balancer, keys: list[bytes], now: float = 0.0, *, avoid: str = "") -> list[str]:
    """Where lines go that run at the same time."""
    found = []
    for key in keys:
        found.append(balancer.choose(key, now, avoid=avoid))
        balancer.outstanding[found[-1]] += 1
    return found


def test_lines_that_begin_alike_go_to_one_address_which_every_process_knows() -> None:
    homes = [Balancer(PODS).choose(b"prompt %d" % n, 0.0) for n in range(100)]
    assert homes == [Balancer(PODS[::-1]).choose(b"prompt %d" % n, 0.0) for n in range(100)]
    assert set(homes) == set(PODS)


def test_most_lines_keep_their_home_when_an_address_comes() -> None:
    keys = [b"%d" % n for n in range(1000)]
    before = [Balancer(PODS).choose(key, 0.0) for key in keys]
    after = [Balancer([*PODS, "10.0.0.9"]).choose(key, 0.0) for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"10.0.0.9"}
    assert 150 < len(moved) < 250


def test_one_common_beginning_does_not_load_one_address_alone() -> None:
    counts = Counter(lines(Balancer(PODS), [b"same"] * 400))
    assert max(counts.values()) <= 1.3 * 100
    assert min(counts.values()) >= 0.7 * 100


def test_an_address_that_refused_gets_nothing_for_a_while() -> None:
    balancer = Balancer(PODS)
    balancer.eject(PODS[0], 0.0)
    keys = [b"%d" % n for n in range(100)]
    assert PODS[0] not in lines(balancer, keys, EJECT_S - 0.1)
    assert PODS[0] in lines(balancer, keys, EJECT_S)


def test_where_all_refused_all_are_tried() -> None:
    balancer = Balancer(PODS)
    for pod in PODS:
        balancer.eject(pod, 0.0)
    assert set(lines(balancer, [b"%d" % n for n in range(100)])) == set(PODS)


def test_a_line_that_failed_somewhere_is_tried_elsewhere() -> None:
    assert PODS[1] not in lines(Balancer(PODS), [b"%d" % n for n in range(100)], avoid=PODS[1])
    assert lines(Balancer(["one"]), [b"x"], avoid="one") == ["one"]


class Names:
    """A name service that is asked in vain while `found` is None."""

    def __init__(self, found: list[str] | None) -> None:
        self.found = found
        self.asked = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked += 1
        if self.found is None:
            raise OSError("no such name")
        return self.found


def test_a_name_is_looked_up_again_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    names = Names(["10.0.0.1"])

    async def run() -> None:
        nonlocal now
        endpoints = Endpoints("pods.example", 80, resolve=names.resolve)
        assert await endpoints.choose(b"") == "10.0.0.1"
        names.found = ["10.0.0.2"]
        now += RESOLVE_S - 1
        assert await endpoints.choose(b"") == "10.0.0.1"
        assert names.asked == 1
        now += 2
        await endpoints.choose(b"")  # sets off the look-up, which nobody waits for
        await asyncio.sleep(0)
        assert await endpoints.choose(b"") == "10.0.0.2"
        names.found = None
        now += RESOLVE_S + 1
        await endpoints.choose(b"")
        await asyncio.sleep(0)
        assert await endpoints.choose(b"") == "10.0.0.2", "a name service that is away takes no server away"
        await endpoints.close()

    asyncio.run(run())


def test_a_name_that_was_never_found_is_an_error_until_it_is_found() -> None:
    names = Names(None)

    async def run() -> None:
        endpoints = Endpoints("pods.example", 80, resolve=names.resolve)
        with pytest.raises(OSError, match=r"pods\.example"):
            await endpoints.choose(b"")
        names.found = PODS
        assert await endpoints.choose(b"") in PODS

    asyncio.run(run())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_an_address_is_one_endpoint_and_is_not_looked_up(host: str) -> None:
    names = Names(PODS)
    assert asyncio.run(Endpoints(host, 80, resolve=names.resolve).choose(b"")) == host
    assert names.asked == 0
