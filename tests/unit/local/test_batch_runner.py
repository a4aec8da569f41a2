"""The phases of a batch: what is started after what ended how. The pods are stand-ins that end when they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from banyan_operator.kube.kinds import Manifest
from banyan_operator.local import batch_runner, runner
from banyan_operator.local.batch_runner import BatchRunner
from banyan_operator.observed import pods
from banyan_operator.observed.conditions import yes
from banyan_operator.observed.pods import End
from banyan_operator.observed.termination import TerminationMessage

COUNTS = {"total": 3, "completed": 3, "failed": 0}


class Worker:
    """In the place of a `Pod`."""

    def __init__(self, prefix: str, namespace: str, template: Manifest, machine: Any) -> None:
        self.name = prefix + "x"
        self.container = template["spec"]["containers"][0]
        self.args: list[str] = self.container["args"]
        self.ports: dict[int, int] = {}
        self.stopping = self.failed = self.ready = False
        self.readyz = None
        self._end: End | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        await self._over.wait()

    def ends(self, exit_code: int, code: str = "", **counts: Any) -> None:
        message = TerminationMessage(code, "", "", "why", {"code": code, **counts})
        self._end = End("Error" if exit_code else "Completed", exit_code, message, "2026-11-21T12:00:00Z")
        self.failed = exit_code != 0
        self._over.set()

    def stop(self, *, pre_stop: bool = True) -> None:
        self.stopping = True
        self.ends(143, "interrupted")

    def observed(self) -> pods.Pod:
        over = self._end is not None
        container = pods.Container("worker", "", False, False, 0, "", "", None if over else "2026-11-21T12:00:00Z", self._end, None)
        phase = "Running" if not over else "Failed" if self.failed else "Succeeded"
        return pods.Pod(name=self.name, revision="", created="", deleted=None, phase=phase, ready=False, containers=(container,))


class Life:
    """A batch in local mode, a turn at a time."""

    def __init__(self, **spec: Any) -> None:
        self.runner = BatchRunner(self.manifest(**spec), self._machine(), lambda key: None)
        self.spec = spec

    def manifest(self, **spec: Any) -> Manifest:
        own: dict[str, Any] = {"server": {"model": {"uri": "pvc://models/x"}}} if "serverRef" not in spec else {}
        places = {"input": {"uri": "s3://bucket/in.jsonl"}, "output": {"uri": "s3://bucket/out/"}, "s3": {"region": "x"}}
        metadata = {"name": "nightly", "namespace": "default", "uid": "0123456789ab", "generation": 1}
        kind = {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": "BatchJob"}
        return {**kind, "metadata": metadata, "spec": {**own, **places, **spec}, "status": {}}

    def _machine(self) -> Any:
        class Machine:
            find = staticmethod(lambda key: None)
            changed = say = staticmethod(lambda *_: None)

        return Machine()

    async def turns(self, number: int = 6) -> list[Any]:
        """The workers that run after some turns."""
        for _ in range(number):
            self.runner.turn()
            self.runner.fill_status()
            await asyncio.sleep(0)
        return self.runner.pods

    def edit(self, **spec: Any) -> None:
        self.runner.update({**self.manifest(**self.spec, **spec), "status": self.runner.resource["status"]})

    async def to_work(self) -> list[Any]:
        (await self.turns())[0].ends(0, "planned", requestCounts={**COUNTS, "completed": 0}, shards=2)
        return await self.turns()

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.runner.resource["status"]
        return found

    def reason(self, kind: str) -> str:
        return next(str(one["reason"]) for one in self.status["conditions"] if one["type"] == kind)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Awaitable[None]]], None]:
    monkeypatch.setattr(runner, "Pod", Worker)
    monkeypatch.setattr(batch_runner, "FIRST_RETRY_S", 0.0)
    return lambda story: asyncio.run(story())  # type: ignore[arg-type]


def phase_of(worker: Any) -> str:
    return next(str(word.partition("=")[2]) for word in worker.args if word.startswith("--phase="))


def test_plan_work_and_merge_follow_each_other_and_each_worker_is_a_process(live: Any) -> None:
    async def story() -> None:
        life = Life(workers=3)
        assert [phase_of(one) for one in await life.turns()] == ["plan"]
        assert life.status["phase"] == "Planning"
        workers = await life.to_work()
        assert [phase_of(one) for one in workers] == ["work"] * 3
        indexes = [one["value"] for worker in workers for one in worker.container["env"] if one["name"] == "JOB_COMPLETION_INDEX"]
        assert indexes == ["0", "1", "2"]
        assert (life.status["phase"], life.status["requests"], life.status["shardsText"]) == ("Running", "0/3", "0/2")
        workers[1].ends(0, "worked", requestCounts=COUNTS)
        (merge,) = await life.turns()
        assert phase_of(merge) == "merge"
        assert life.status["phase"] == "Merging"
        merge.ends(0, "succeeded", requestCounts=COUNTS, output="file:///out")
        assert await life.turns() == []
        assert (life.status["phase"], life.status["outputURI"], life.status["shardsText"]) == ("Succeeded", "file:///out", "2/2")

    live(story)


@pytest.mark.parametrize(
    ("exit_code", "code", "reason"), [(65, "input_not_found", "InputNotFound"), (77, "storage_denied", "AccessDenied")]
)
def test_a_plan_that_cannot_be_made_is_the_end(live: Any, exit_code: int, code: str, reason: str) -> None:
    async def story() -> None:
        life = Life()
        (await life.turns())[0].ends(exit_code, code)
        assert await life.turns() == []
        assert (life.status["phase"], life.reason("Failed")) == ("Failed", reason)

    live(story)


def test_a_worker_that_fails_is_started_again_as_often_as_the_spec_says_and_what_was_done_is_published(live: Any) -> None:
    async def story() -> None:
        life = Life(workerBackoffLimit=1)
        for _ in range(2):
            (worker,) = await (life.to_work() if not life.runner._batch.planned else life.turns())
            worker.ends(75, "storage_unavailable")
        (merge,) = await life.turns()
        assert "--partial=failed" in merge.args
        merge.ends(0, "failed", requestCounts=COUNTS, output="x")
        await life.turns()
        assert (life.status["phase"], life.reason("Failed")) == ("Failed", "StorageUnavailable")

    live(story)


@pytest.mark.parametrize(("planned", "partial"), [(False, []), (True, ["--partial=cancelled"])])
def test_a_cancelled_batch_publishes_what_was_done(live: Any, planned: bool, partial: list[str]) -> None:
    async def story() -> None:
        life = Life()
        await (life.to_work() if planned else life.turns())
        life.edit(cancel=True)
        left = await life.turns()
        assert [word for one in left for word in one.args if word.startswith("--partial")] == partial
        for one in left:
            assert life.status["phase"] == "Cancelling"
            one.ends(0, "cancelled", output="x")
        await life.turns()
        assert life.status["phase"] == "Cancelled"

    live(story)


def test_a_suspended_batch_stands_still_and_goes_on_where_it_was(live: Any) -> None:
    async def story() -> None:
        life = Life(workers=2)
        await life.to_work()
        life.edit(suspend=True)
        assert await life.turns() == []
        assert life.status["phase"] == "Suspended"
        life.edit(suspend=False)
        assert [phase_of(one) for one in await life.turns()] == ["work"] * 2

    live(story)


def test_workers_come_and_go_with_the_spec(live: Any) -> None:
    async def story() -> None:
        life = Life()
        await life.to_work()
        life.edit(workers=3)
        assert len(await life.turns()) == 3
        life.edit(workers=2)
        assert len(await life.turns()) == 2

    live(story)


@pytest.mark.parametrize("failed", [0, 1])
def test_fewer_workers_of_which_none_may_be_tried_again_end_the_work(live: Any, failed: int) -> None:
    async def story() -> None:
        life = Life(workerBackoffLimit=0)
        await life.to_work()
        life.edit(workers=2)
        (await life.turns())[failed].ends(75, "storage_unavailable")
        await life.turns()
        life.edit(workers=1)
        left = await life.turns(12)
        assert [phase_of(one) for one in left] == (["merge"], ["work"])[failed]

    live(story)


def test_the_work_waits_for_a_server_and_the_plan_does_not(live: Any) -> None:
    async def story() -> None:
        life = Life(serverRef={"name": "chat"})
        assert await life.to_work() == []
        assert (life.status["phase"], life.reason("Running")) == ("Planning", "WaitingForServer")

    live(story)


def test_a_worker_that_is_tried_again_asks_no_other_server_when_its_own_has_gone(live: Any) -> None:
    async def story() -> None:
        life = Life(serverRef={"name": "chat"})
        server = SimpleNamespace(accepted=yes("Accepted", ""), takes_requests=True, proxy=SimpleNamespace(url="http://127.0.0.1:20001"))
        life.runner._server_of = lambda key: cast(Any, server)
        (worker,) = await life.to_work()
        life.runner._server_of = lambda key: None
        worker.ends(69, "server_gone")
        (again,) = await life.turns()
        url = {"name": "BANYAN_SERVER_URL", "value": "http://127.0.0.1:20001"}
        assert url in worker.container["env"]
        assert url in again.container["env"]

    live(story)


def test_what_an_earlier_run_planned_is_not_planned_again_and_what_has_ended_stays_ended(live: Any) -> None:
    async def story() -> None:
        life = Life()
        await life.to_work()
        again = Life()
        again.runner = BatchRunner({**again.manifest(), "status": life.status}, again._machine(), lambda key: None)
        assert [phase_of(one) for one in await again.turns()] == ["work"]
        over = Life()
        over.runner = BatchRunner({**over.manifest(), "status": {"phase": "Succeeded"}}, over._machine(), lambda key: None)
        assert await over.turns() == []

    live(story)
