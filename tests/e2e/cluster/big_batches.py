"""BatchJobs of 2,000 lines and four workers that take a while, so that something can happen to them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tests.e2e.cluster.batches import Bucket, batch_job, lines, secret
from tests.e2e.cluster.kubectl import Kubectl, Manifest, condition
from tests.e2e.cluster.pace import tokens_for
from tests.e2e.cluster.results import check_results, wait_for_some
from tests.support.s3.servers import S3Server

LINES = 2000
IDS = [f"line-{number}" for number in range(LINES)]
LITTLE = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "384Mi"}}  # some CPU, however busy the machine
WORKERS = 4
LASTS_S = {"in": 10.0, "slow": 30.0, "endless": 300.0}
"""How long its workers have to do with each input, at least: by the answers' lengths, and as if nothing else took them time."""
LIMIT_S = 700  # for a batch's end; a machine with other work is slow, and some machines are by themselves
ONE_THREAD = {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}  # servers that share a machine, for a model too small for more


@dataclass(frozen=True)
class BigBatches:
    """Makes and watches BatchJobs of one namespace over one bucket."""

    team: Kubectl
    s3: S3Server
    bucket: Bucket
    token_s: float
    """What a token takes the servers that are asked."""

    @staticmethod
    def new(team: Kubectl, s3: S3Server, token_s: float) -> BigBatches:
        team.apply(secret("store"))
        bucket = Bucket(s3)
        for source, seconds in LASTS_S.items():
            bucket.put(f"{source}.jsonl", lines(LINES, tokens_for(seconds * WORKERS / LINES, token_s), exactly=True))
        return BigBatches(team, s3, bucket, token_s)

    def begin(self, name: str, source: str = "in", **spec: Any) -> None:
        """A BatchJob with four workers that send one line at a time."""
        place = {"input": {"uri": f"s3://{self.bucket.name}/{source}.jsonl"}, "output": {"uri": f"s3://{self.bucket.name}/{name}/"}}
        usual: dict[str, Any] = {"workers": WORKERS, "maxConcurrency": 1, "sharding": {"targetRequests": 100}, "resources": LITTLE}
        server = {} if "server" in spec else {"serverRef": {"name": "spread"}}
        self.team.apply(batch_job(name, self.bucket, self.s3, **{**place, **usual, **server, **spec}))

    def until_some(self, name: str, count: int = 1) -> int:
        return wait_for_some(self.bucket, name, count, of=LINES)

    def workers(self, name: str) -> list[str]:
        """The pods that work now."""
        pods = self.team.items("pods", f"serving.banyan.dev/batchjob={name},app.kubernetes.io/component=work")
        alive = [pod for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]]
        return sorted(pod["metadata"]["name"] for pod in alive)

    def nodes(self, name: str) -> set[str]:
        """Where they work."""
        return {self.team.get(f"pod/{pod}")["spec"]["nodeName"] for pod in self.workers(name)}

    def until_workers(self, name: str, count: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(found := self.workers(name)) != count:
            assert time.monotonic() < deadline, f"{name}: {found} work, and not {count}"
            time.sleep(1.0)

    def wait(self, name: str, what: str) -> Manifest:
        self.team("wait", f"bj/{name}", f"--for=condition={what}", f"--timeout={LIMIT_S}s", timeout=LIMIT_S + 30)
        return self.team.get(f"bj/{name}")

    def check(self, name: str, phase: str = "Succeeded", outcome: str = "completed") -> set[str]:
        """Wait for the end; everything must be as it is to be. Returns the codes of lines that were not answered."""
        job = self.wait(name, phase if phase in ("Cancelled", "Expired") else "Complete")
        assert job["status"]["phase"] == phase, job["status"]
        assert condition(job, "Complete")["reason"] == phase
        assert condition(job, "Failed").get("status") == "False"
        results = check_results(self.bucket, name, IDS, job, outcome)
        if outcome == "completed":
            assert results.errors == []
        assert self.workers(name) == []
        return results.codes()
