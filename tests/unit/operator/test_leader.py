from __future__ import annotations

import asyncio
from typing import Any

import pytest

from banyan_operator.cluster import leader
from banyan_operator.cluster.client import ApiError
from banyan_operator.cluster.leader import DURATION_S, Lease, LeaseLostError, Rivals
from banyan_operator.kube import kinds
from tests.support.kube.http import ApiServer, connected, refusal

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


def test_who_let_one_lease_expire_holds_none() -> None:
    """However many namespaces there are: each would be waited for in turn, since a clock begins when a lease is first looked at."""

    async def go() -> None:
        server, clock = ApiServer(), Clock()
        async with connected(server) as api:
            seen = set[str]()
            gone, other = ([Lease(api, place, "banyan-operator", name, clock) for place in ("a", "b", "c")] for name in ("gone", "other"))
            mine = [Lease(api, place, "banyan-operator", "mine", clock, gone=seen) for place in ("a", "b", "c")]
            for lease in (*gone[:2], other[2]):
                assert await lease._try()
            assert not await mine[0]._try()
            clock.now += DURATION_S
            assert [await lease._try() for lease in mine] == [True, True, False]  # who holds the last one may well live
            assert seen == {"gone"}

    asyncio.run(go())


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


CANNOT = 'leases.coordination.k8s.io is forbidden: User "x" cannot list resource "leases" in API group "coordination.k8s.io"'


@pytest.mark.parametrize("namespaces", [(), ("team",)])
def test_who_may_not_see_whether_another_leads_stands_by_and_says_so(
    namespaces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader, "RETRY_S", 0.01)

    async def scenario() -> None:
        server = ApiServer(answer=lambda _: refusal(403, "Forbidden", CANNOT))
        async with connected(server) as api:
            rivals = Rivals(api, "banyan-operator", namespaces, "kube-system")
            with pytest.raises(ApiError):
                await rivals.found()
            alone = asyncio.create_task(rivals.gone())
            tried = asyncio.Event()

            def refuse(_: Any) -> Any:
                if rivals.trouble is not None:
                    tried.set()
                return refusal(403, "Forbidden", CANNOT)

            server.answer = refuse
            async with asyncio.timeout(10):
                await tried.wait()  # it is told, and tries again
            assert rivals.trouble is not None
            assert CANNOT.partition(":")[0] in rivals.trouble
            assert not alone.done()
            server.answer = lambda _: None
            await alone
            assert rivals.trouble is None

    asyncio.run(scenario())
    assert len([one for one in caplog.records if "standing by" in one.message and one.levelname == "WARNING"]) == 1


def held(server: ApiServer, namespace: str, holder: str) -> None:
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "banyan-operator"}}
    server.store(kinds.LEASE.path(namespace, "banyan-operator"), {**lease, "spec": {"holderIdentity": holder}})


def test_a_rival_that_does_not_renew_its_lease_is_none() -> None:
    async def scenario() -> None:
        server, clock = ApiServer(), Clock()
        async with connected(server) as api:
            rivals = Rivals(api, "banyan-operator", (), "kube-system", clock)
            assert await rivals.found() is None
            held(server, "team", "elsewhere/banyan-operator-5c9d_0f3a")
            assert await rivals.found() == "lease team/banyan-operator is held by elsewhere/banyan-operator-5c9d_0f3a"
            clock.now += DURATION_S
            assert await rivals.found() is None

    asyncio.run(scenario())
