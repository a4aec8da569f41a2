"""Requests a second that the front takes on and answers, with an engine that costs nothing: streamed completions of --tokens
token ids in, --output out.

    python benchmarks/front_requests.py [--requests 4000] [--concurrency 64] [--tokens 32] [--output 1] [--step-ms 0] [--rounds 3]
        [--processes 1]

The front is the real one, with the processes beside it that plan requests; the engine at the other end of its wire gives all that run
a token every --step-ms, or as soon as it can, and the client is the one of the load generator. Each is a process of its own. Also told:
CPU microseconds a request, by process; the time to the first token, and how many tokens came in a piece.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import uvloop
from front import INFO, connected, ends, write_model
from load.client import Server
from load.plan import Ask, Plan, Session
from load.play import play
from load.summary import Summary

from banyan_runtime import logs, wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.prepare.fork_server import ForkServer
from banyan_runtime.front.prepare.worker_pool import WORKERS
from banyan_runtime.process import collect_rarely
from banyan_runtime.server.api_processes.early import Early
from banyan_runtime.server.api_processes.manager import ApiProcesses
from banyan_runtime.server.api_processes.messages import Open
from banyan_runtime.server.clients import Clients
from banyan_runtime.server.front import Front

WARM_UP = 200  # requests


async def serve_front(address: str, folder: Path, processes: int = 1) -> None:
    """Be the front; prints the port once requests can come. `processes`: as --tokenizer-worker-num."""
    config = ServerConfig(model_path=str(folder), served_model_name=("front",))
    early = [Early() for _ in range(processes - 1)]
    client = EngineClient(clients=processes)
    parts = Front(config, logs.configure("api", level="error"), client)
    client.bind(address)
    info = await client.wait_ready()
    fork_server = ForkServer(config, folder)
    await parts.load_text(fork_server)
    workers = max(2, WORKERS // processes)
    await parts.prepare_with(fork_server, workers)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        others = ApiProcesses(parts, early, listening)
        serving = asyncio.create_task(parts.http.serve([listening]))
        told = processes, config.engine_json(), parts.context.gate.told(), str(folder), None, info, workers, os.getpid(), ""
        await others.open(lambda number: Open(number, *told))
        collect_rarely()  # as a server does when it is ready
        parts.state.enter("ready")
        others.tell_state()
        print(listening.getsockname()[1], flush=True)
        await serving


def engine_of(address: str, step_s: float) -> None:
    """Be the engine: in each step, one message, all requests that are there get a token; with its last one each its end."""
    clients = Clients(connected(address))
    clients.send(wire.Ready(INFO))
    left: dict[int, int] = {}  # tokens, by request
    due = time.monotonic()
    while True:
        select.select(clients.links, [], [], max(0.0, due - time.monotonic()) if left else None)
        for message in clients.receive():
            if isinstance(message, wire.Submit):
                left[message.id] = message.sampling.max_new_tokens
            elif isinstance(message, wire.Ping):
                clients.send(wire.Pong(message.seq))
        now = time.monotonic()
        if left and now >= due:
            due = max(due + step_s, now)
            ids = list(left)
            over = ends([one for one in ids if left[one] == 1])
            clients.send(wire.StepOutput(ids, wire.pack_ids([40] * len(ids)), over))
            left = {one: count - 1 for one, count in left.items() if count > 1}


@contextlib.contextmanager
def front(step_s: float = 0.0, processes: int = 1) -> Iterator[tuple[int, str]]:
    """The front's process id and its URL."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        address = f"{folder}/engine"
        start = [sys.executable, __file__]
        served = subprocess.Popen(
            [*start, "--serve", address, folder, "--processes", str(processes)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        engine = subprocess.Popen([*start, "--engine", address, "--step-ms", str(1000 * step_s)])
        try:
            assert served.stdout is not None
            yield served.pid, f"http://127.0.0.1:{int(served.stdout.readline())}"
        finally:
            engine.kill()
            served.terminate()
            engine.wait()
            served.wait()


def cpu_seconds(pid: int) -> tuple[float, float, float]:
    """Of the first API process, of the others, and of the processes that plan."""
    root = psutil.Process(pid)
    others, beside = 0.0, 0.0
    for one in root.children(recursive=True):
        spent = one.cpu_times().user + one.cpu_times().system
        if "banyan_runtime.server.api_processes.process" in one.cmdline():
            others += spent
        else:
            beside += spent
    return root.cpu_times().user + root.cpu_times().system, others, beside


def measure(requests: int, concurrency: int, tokens: int, output: int = 1, step_s: float = 0.0, processes: int = 1) -> dict[str, float]:
    """Requests a second, median milliseconds to the end, CPU microseconds a request of the first API process, of the others and of those
    who plan."""
    sessions = tuple(Session((Ask(tuple(40 + place % 200 for place in range(tokens)), output),)) for _ in range(requests))
    plan = Plan("front", sessions, concurrency)
    with front(step_s, processes) as (pid, url):
        server = Server(url, "front")
        uvloop.run(play(Plan("warm-up", sessions[:WARM_UP], concurrency), server))
        server.close()
        before = cpu_seconds(pid)
        summary = Summary.of(uvloop.run(play(plan, Server(url, "front"))))
        own, others, beside = (1e6 * (after - was) / requests for after, was in zip(cpu_seconds(pid), before, strict=True))
    assert not summary.errors, summary.errors
    assert summary.e2e_s is not None
    assert summary.ttft_s is not None
    return {
        "requests_per_s": summary.requests_per_s,
        "p50_ms": 1000 * summary.e2e_s.p50,
        "first_ms": 1000 * summary.ttft_s.p50,
        "tokens_per_piece": summary.tokens_per_piece or 1.0,
        "front_us": own,
        "others_us": others,
        "prepare_us": beside,
    }


def median_of(
    rounds: int, requests: int, concurrency: int, tokens: int = 32, output: int = 1, step_s: float = 0.0, processes: int = 1
) -> dict[str, float]:
    found = [measure(requests, concurrency, tokens, output, step_s, processes) for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of a prompt")
    parser.add_argument("--output", type=int, default=1, help="tokens of an answer")
    parser.add_argument("--step-ms", type=float, default=0.0, help="milliseconds between an engine's steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="that answer requests, as --tokenizer-worker-num")
    parser.add_argument("--serve", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--engine", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve_front(options.serve[0], Path(options.serve[1]), options.processes))
    elif options.engine:
        engine_of(options.engine, options.step_ms / 1000)
    else:
        asked = (options.requests, options.concurrency, options.tokens, options.output, options.step_ms / 1000, options.processes)
        print(json.dumps(median_of(options.rounds, *asked), indent=1))


if __name__ == "__main__":
    main()
