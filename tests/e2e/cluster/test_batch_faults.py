"""BatchJobs of 2,000 lines, and what happens meanwhile to those who work on them: every line comes out once, in order, and the end is told.

The first part is stories that go on at the same time, each with a BatchJob of its own; then comes what concerns the whole cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.cluster.batches import MODEL
from tests.e2e.cluster.big_batches import LIMIT_S, LINES, ONE_THREAD, WORKERS, BigBatches
from tests.e2e.cluster.faults import needs_parts, run_out_of_memory, without_api_server
from tests.e2e.cluster.kubectl import Kubectl, is_true
from tests.e2e.cluster.pace import seconds_per_token
from tests.e2e.cluster.results import recorded
from tests.e2e.conftest import TIMES, inference_server
from tests.support.s3.servers import S3Server, weed, weed_ports

AWAY_S = 30.0

pytestmark = pytest.mark.timeout(LIMIT_S * 2)


Story = Callable[[BigBatches, Path], None]


def pods_are_deleted(all_: BigBatches, _: Path) -> None:
    all_.begin("deleted")
    all_.until_workers("deleted", WORKERS)
    all_.until_some("deleted")
    first, second, *_rest = all_.workers("deleted")
    all_.team("delete", "pod", first, "--wait=false")
    all_.team("delete", "pod", second, "--grace-period=0", "--force")
    all_.check("deleted")


def memory_runs_out(all_: BigBatches, _: Path) -> None:
    all_.begin("starved")
    all_.until_some("starved")
    run_out_of_memory(all_.team, all_.workers("starved")[0], "worker")
    assert recorded(all_.bucket, "starved") < LINES
    all_.check("starved")


def workers_change(all_: BigBatches, _: Path) -> None:
    all_.begin("elastic", "slow")
    all_.until_some("elastic")
    all_.team.patch("bj/elastic", {"spec": {"workers": 2}})
    all_.until_workers("elastic", 2)
    all_.team.patch("bj/elastic", {"spec": {"workers": 6}})
    all_.until_workers("elastic", 6)
    assert recorded(all_.bucket, "elastic") < LINES
    all_.check("elastic")


def it_is_suspended(all_: BigBatches, _: Path) -> None:
    all_.begin("paused")
    all_.until_some("paused")
    all_.team.patch("bj/paused", {"spec": {"suspend": True}})
    job = all_.wait("paused", "Suspended")
    done = recorded(all_.bucket, "paused")
    assert all_.workers("paused") == []
    assert job["status"]["requestCounts"]["completed"] <= done < LINES
    time.sleep(3.0)
    assert recorded(all_.bucket, "paused") == done
    all_.team.patch("bj/paused", {"spec": {"suspend": False}})
    all_.check("paused")


def it_is_cancelled(all_: BigBatches, _: Path) -> None:
    all_.begin("cancelled", "endless")
    done = all_.until_some("cancelled")
    all_.team.patch("bj/cancelled", {"spec": {"cancel": True}})
    assert all_.check("cancelled", "Cancelled", "cancelled") == {"batch_cancelled"}
    # A status that is final is true: whatever ran is over, and what was done is there.
    job = all_.team.get("bj/cancelled")
    assert job["status"]["requestCounts"]["completed"] >= done
    pods = all_.team.items("pods", "serving.banyan.dev/batchjob=cancelled")
    assert [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")] == []


def its_deadline_passes(all_: BigBatches, _: Path) -> None:
    all_.begin("expired", "endless")
    all_.until_some("expired")
    all_.team.patch("bj/expired", {"spec": {"deadlineSeconds": 60}})  # since it began
    assert all_.check("expired", "Expired", "expired") == {"batch_expired"}
    assert all_.team.get("bj/expired")["status"]["requestCounts"]["completed"] > 0


def the_storage_is_restarted(all_: BigBatches, folder: Path) -> None:
    ports, address = weed_ports(), all_.s3.endpoint.removeprefix("http://").partition(":")[0]
    with ExitStack() as later:
        with weed(folder, address, ports) as s3:
            own = BigBatches.new(all_.team, s3, all_.token_s)
            own.begin("stored")
            own.until_some("stored")
        time.sleep(AWAY_S / 2)
        later.enter_context(weed(folder, address, ports))
        assert recorded(own.bucket, "stored") < LINES
        own.check("stored")


def it_has_servers_of_its_own(all_: BigBatches, _: Path) -> None:
    own = {
        "model": {"uri": f"pvc://models/{MODEL}", "servedNames": [MODEL]},
        "runtime": ONE_THREAD,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
    }
    all_.begin("own", workers=2, maxConcurrency=2, server=own)
    all_.until_some("own")
    all_.team("delete", "pod", all_.workers("own")[0], "--wait=false")
    all_.check("own")


STORIES: dict[str, Story] = {
    "pods of workers are deleted": pods_are_deleted,
    "a worker runs out of memory": memory_runs_out,
    "there are two workers, and then six": workers_change,
    "it is suspended and resumed": it_is_suspended,
    "it is cancelled": it_is_cancelled,
    "its deadline passes": its_deadline_passes,
    "the storage is restarted": the_storage_is_restarted,
    "a pod with a server of its own is deleted": it_has_servers_of_its_own,
}


@pytest.fixture(scope="module")
def batches(team: Kubectl, s3: S3Server) -> Iterator[BigBatches]:
    team.apply(inference_server("spread", replicas=2, runtime=ONE_THREAD))
    team.until("isrv/spread", is_true("Ready"), 120)
    yield BigBatches.new(team, s3, seconds_per_token(team, "spread"))
    team("delete", "isrv", "spread", "--wait=false")


@pytest.fixture(scope="module")
def told(
    batches: BigBatches, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """The stories that are asked for, all of them begun."""
    asked = {story for item in request.session.items for story in STORIES if item.name.endswith(f"[{story}]")}
    with ThreadPoolExecutor(len(STORIES)) as pool:
        folders = {story: tmp_path_factory.mktemp("story") for story in asked}
        yield {story: pool.submit(STORIES[story], batches, folders[story]) for story in STORIES if story in asked}


@pytest.mark.parametrize("story", STORIES)
def test_every_line_comes_out_once_and_the_end_is_told_when(story: str, told: dict[str, Future[None]]) -> None:
    told[story].result(LIMIT_S * 2)


@needs_parts
def test_a_batch_goes_on_without_api_server_and_operator(batches: BigBatches, system: Kubectl, told: dict[str, Future[None]]) -> None:
    operator = "app.kubernetes.io/component=operator"
    batches.begin("unattended", "slow")
    batches.until_some("unattended")
    (pod,) = system.items("pods", operator)
    run_out_of_memory(system, pod["metadata"]["name"], "operator")
    before = batches.until_some("unattended")
    with without_api_server(system):
        time.sleep(AWAY_S)
        meanwhile = recorded(batches.bucket, "unattended")
    assert before < meanwhile, "the workers need neither of them"
    began = time.monotonic()
    system("delete", "pod", "-l", operator, "--wait=false")
    batches.check("unattended")
    TIMES["an API server that is back until a batch of 2,000 lines has ended"] = time.monotonic() - began
