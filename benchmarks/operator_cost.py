"""What the operator costs: an idle one with many servers, and an event among few and among many objects.

    python benchmarks/operator_cost.py [--servers 1000] [--objects 10 1000 10000] [--idle 60] [--events 300] [--out FILE.json]

The operator runs as a process against an API server in a process of its own, over HTTP: `tests/support/kube/http.py`, with each
Deployment's ReplicaSet and pods ready at once. Idle: the calls that it makes in so many seconds, by what they are
for, its processor time and memory. Event: pods change one after another, and what processor time and calls that costs each; an
InferenceServer with one replica is seven objects or so. Processor time includes Python's TLS-free HTTP, kopf, the store, and one
decision for each event. The API server's own time is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

from banyan_operator.kube import kinds  # noqa: E402
from tests.support.kube.controllers import ReadyAtOnce  # noqa: E402
from tests.support.kube.http import ApiServer, Call, serving  # noqa: E402

NAMESPACE = "bench"


class Bench(ApiServer):
    """With requests of the benchmark's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ReadyAtOnce(self.kept)

    def told(self, call: Call) -> web.Response | None:
        """The benchmark's own requests."""
        if not call.path.startswith("/bench"):
            return None
        self.calls.pop()
        match call.path:
            case "/bench/servers":
                for number in range(int(call.query["from"]), int(call.query["to"])):
                    spec = {"model": {"uri": "catalog://smollm2-135m"}, "replicas": 1}
                    server = {"apiVersion": kinds.INFERENCE_SERVER.api_version, "kind": "InferenceServer", "spec": spec}
                    self.store(kinds.INFERENCE_SERVER.path(NAMESPACE, f"s{number:05}"), server)
            case "/bench/touch":
                place = kinds.POD.path(NAMESPACE, f"s{int(call.query['server']):05}-0")
                pod = self.objects[place]
                states = [{**one, "restartCount": one["restartCount"] + 1} for one in pod["status"]["containerStatuses"]]
                self.store(place, {**pod, "status": {**pod["status"], "containerStatuses": states}})
            case "/bench/calls":
                count = {"watch": 0, "lease": 0, "other": 0}
                for one in self.calls:
                    count["watch" if one.watches else "lease" if "/leases" in one.path else "other"] += 1
                others = sorted({f"{one.method} {one.path}" for one in self.calls if not one.watches and "/leases" not in one.path})[:10]
                self.calls.clear()
                servers = [one for place, one in self.objects.items() if "/inferenceservers/" in place]
                ready = sum((one.get("status") or {}).get("phase") == "Ready" for one in servers)
                return web.json_response({**count, "others": others, "servers": len(servers), "ready": ready, "objects": len(self.objects)})
        return web.json_response({})


def serve(ready: Any) -> None:
    async def run() -> None:
        server = Bench()
        server.answer = server.told
        async with serving(server) as url:
            ready.send(url)
            await asyncio.Event().wait()

    asyncio.run(run())


class Rig:
    """An API server and an operator."""

    def __init__(self, folder: Path) -> None:
        here, there = multiprocessing.Pipe()
        self.server = multiprocessing.Process(target=serve, args=(there,), daemon=True)
        self.server.start()
        self.url = here.recv()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (folder / "config").write_text(yaml.safe_dump(config))
        env = {**os.environ, "KUBECONFIG": str(folder / "config"), "PYTHONPATH": str(ROOT / "operator")}
        words = [sys.executable, "-m", "banyan_operator", "run", "--runtime-image", "i", "--port", "0", "--log-level", "warning"]
        self.log = (folder / "log").open("w+")
        self.operator = subprocess.Popen(words, env=env, stderr=self.log)

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path) as answer:
            return json.load(answer)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.operator.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        lines = Path(f"/proc/{self.operator.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def grow(self, servers: int) -> None:
        """Until so many servers are ready and the operator has come to rest."""
        found = self.ask("/bench/calls")
        self.ask(f"/bench/servers?from={found['servers']}&to={servers}")
        while (found := self.ask("/bench/calls"))["ready"] < servers or found["other"]:
            assert self.operator.poll() is None, "the operator has ended"
            time.sleep(3)

    def idle(self, seconds: float) -> dict[str, Any]:
        self.ask("/bench/calls")
        began = self.cpu_s()
        time.sleep(seconds)
        found, cpu = self.ask("/bench/calls"), self.cpu_s() - began
        a_minute = {name: round(found[name] * 60 / seconds, 1) for name in ("watch", "lease", "other")}
        rest = {"calls_a_minute": a_minute, "others": found["others"], "cpu_percent": round(100 * cpu / seconds, 2)}
        return {"servers": found["servers"], "objects": found["objects"], **rest, "rss_mib": round(self.rss_mib(), 1)}

    def events(self, count: int, servers: int) -> dict[str, Any]:
        self.ask("/bench/calls")
        began = self.cpu_s()
        for number in range(count):
            self.ask(f"/bench/touch?server={number * 7919 % servers}")
            time.sleep(0.02)
        time.sleep(3)
        found = self.ask("/bench/calls")
        return {
            "objects": found["objects"],
            "cpu_ms_an_event": round(1000 * (self.cpu_s() - began) / count, 2),
            "calls_an_event": round(found["other"] / count, 2),
            "rss_mib": round(self.rss_mib(), 1),
        }

    def end(self) -> None:
        self.operator.terminate()
        self.operator.wait()
        self.server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--objects", type=int, nargs="*", default=[10, 1000, 10_000])
    parser.add_argument("--idle", type=float, default=60.0)
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    result: dict[str, Any] = {"date": date.today().isoformat(), **machine, "kopf": version("kopf"), "events": []}
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder))
        try:
            rig.grow(1)
            each = rig.ask("/bench/calls")["objects"]
            stops = sorted({*((max(1, objects // each), "events") for objects in arguments.objects), (arguments.servers, "idle")})
            for servers, what in stops:
                rig.grow(servers)
                if what == "idle":
                    result["idle"] = rig.idle(arguments.idle)
                    print(json.dumps(result["idle"]))
                else:
                    result["events"].append(rig.events(arguments.events, servers))
                    print(json.dumps(result["events"][-1]))
        finally:
            rig.end()
            rig.log.seek(0)
            print(rig.log.read(), file=sys.stderr)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
