from __future__ import annotations

import asyncio
from typing import Any

import pytest

from banyan_operator.cluster import leader
from banyan_operator.cluster.leader import DURATION_S, Lease, LeaseLostError
from tests.driver.apiserver import ApiServer, connected, refusal

PATH = "/apis/coordination.k8s.io/v1/namespaces/system/leases/banyan-operator"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(scenario: Any) -> Any:
    async def go() -> Any:
        server, clock = ApiServer(), Clock()
        async with connected(server) as api:
            first, second = (Lease(api, "system", "banyan-operator", name, clock) for name in ("first", "second"))
            return await scenario(server, clock, first, second)

    return asyncio.run(go())


def test_one_holds_the_lease_and_the_other_waits_until_it_expires() -> None:
    async def scenario(server: ApiServer, clock: Clock, first: Lease, second: Lease) -> None:
        assert await first._try()
        assert not await second._try()
        clock.now += DURATION_S - 0.1
        assert not await second._try()
        assert await first._try()  # renewed: the other's clock starts again
        clock.now += DURATION_S - 0.1
        assert not await second._try()
        clock.now += DURATION_S
        assert await second._try()
        assert not await first._try()
        spec = server.objects[PATH]["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("second", 1)

    run(scenario)


def test_a_lease_that_was_let_go_is_taken_at_once() -> None:
    async def scenario(server: ApiServer, clock: Clock, first: Lease, second: Lease) -> None:
        assert await first._try()
        await first.release()
        assert server.objects[PATH]["spec"]["holderIdentity"] == ""
        assert await second._try()
        await first.release()  # not its own any more: nothing happens
        assert server.objects[PATH]["spec"]["holderIdentity"] == "second"

    run(scenario)


def test_of_two_that_write_at_the_same_time_one_gets_it() -> None:
    async def scenario(server: ApiServer, clock: Clock, first: Lease, second: Lease) -> list[bool]:
        return list(await asyncio.gather(first._try(), second._try()))

    assert sorted(run(scenario)) == [False, True]


def test_a_holder_that_cannot_renew_gives_up_before_another_may_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RETRY_S", 0.0)

    async def scenario(server: ApiServer, clock: Clock, first: Lease, second: Lease) -> float:
        assert await first._try()
        began = clock.now

        def fail(_: Any) -> Any:
            clock.now += 1
            return refusal(500, "InternalError", "etcd is away")

        server.answer = fail
        with pytest.raises(LeaseLostError):
            await first.hold()
        return clock.now - began

    assert run(scenario) < DURATION_S
