"""Requests a second that the front takes on and answers, with an engine that costs nothing: streamed completions of --tokens
token ids in, --output out.

    python benchmarks/front_requests.py [--requests 4000] [--concurrency 64] [--tokens 32] [--output 1] [--step-ms 0] [--rounds 3]

The front is the real one, with the processes beside it that plan requests; the engine at the other end of its wire gives all that run
a token every --step-ms, or as soon as it can, and the client is the one of the load generator. Each is a process of its own. Also told:
CPU microseconds a request, by process; the time to the first token, and how many tokens came in a piece.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.app import create_app
from banyan_runtime.front.context import Context
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.ops.http import HttpCounter
from banyan_runtime.front.prepare.pool import PreparerPool
from banyan_runtime.front.prepare.zygote import Zygote
from banyan_runtime.front.state import ServerState
from banyan_runtime.front.text.text import Text
from banyan_runtime.process import collect_rarely
from banyan_runtime.server.http import Http

WARM_UP = 200  # requests


async def serve_front(address: str, folder: Path) -> None:
    """Be the front; prints the port once requests can come."""
    config, state, client = ServerConfig(model_path=str(folder), served_model_name=["front"]), ServerState("front"), EngineClient()
    metrics = Metrics("front", state)
    client.bind(address)
    info = await client.wait_ready()
    text = Text.load(config, folder)
    zygote = Zygote(config, folder)
    await zygote.start()
    zygote.serve(info)
    pool = PreparerPool(zygote, timeout_s=config.prepare_timeout)
    await pool.warm_up()
    context = Context(config, client, text, metrics, state, pool)
    collect_rarely()  # as a server does when it is ready
    state.enter("ready")
    counter = HttpCounter(create_app(context), metrics)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        print(listening.getsockname()[1], flush=True)
        await Http(counter).serve([listening])


def engine_of(address: str, step_s: float) -> None:
    """Be the engine: in each step, one message, all requests that are there get a token; with its last one each its end."""
    engine = connected(address)
    engine.send(wire.encode(wire.Ready(INFO)))
    left: dict[int, int] = {}  # tokens, by request
    due = time.monotonic()
    while True:
        select.select([engine], [], [], max(0.0, due - time.monotonic()) if left else None)
        for message in map(wire.decode_front, engine.receive()):
            if isinstance(message, wire.Submit):
                left[message.id] = message.sampling.max_new_tokens
            elif isinstance(message, wire.Ping):
                engine.send(wire.encode(wire.Pong(message.seq)))
        now = time.monotonic()
        if left and now >= due:
            due = max(due + step_s, now)
            ids = list(left)
            over = ends([one for one in ids if left[one] == 1])
            engine.send(wire.encode(wire.StepOutput(ids, wire.pack_ids([40] * len(ids)), over)))
            left = {one: count - 1 for one, count in left.items() if count > 1}


@contextlib.contextmanager
def front(step_s: float = 0.0) -> Iterator[tuple[int, str]]:
    """The front's process id and its URL."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        address = f"{folder}/engine"
        start = [sys.executable, __file__]
        served = subprocess.Popen([*start, "--serve", address, folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        engine = subprocess.Popen([*start, "--engine", address, "--step-ms", str(1000 * step_s)])
        try:
            assert served.stdout is not None
            yield served.pid, f"http://127.0.0.1:{int(served.stdout.readline())}"
        finally:
            engine.kill()
            served.terminate()
            engine.wait()
            served.wait()


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of the front itself, and of the processes beside it."""
    root = psutil.Process(pid)
    times = [one.cpu_times() for one in [root, *root.children(recursive=True)]]
    own, *beside = [one.user + one.system for one in times]
    return own, sum(beside)


def measure(requests: int, concurrency: int, tokens: int, output: int = 1, step_s: float = 0.0) -> dict[str, float]:
    """Requests a second, median milliseconds to the end, CPU microseconds a request of the front and of those who plan."""
    sessions = tuple(Session((Ask(tuple(40 + place % 200 for place in range(tokens)), output),)) for _ in range(requests))
    plan = Plan("front", sessions, concurrency)
    with front(step_s) as (pid, url):
        server = Server(url, "front")
        uvloop.run(play(Plan("warm-up", sessions[:WARM_UP], concurrency), server))
        server.close()
        before = cpu_seconds(pid)
        summary = Summary.of(uvloop.run(play(plan, Server(url, "front"))))
        own, beside = (1e6 * (after - was) / requests for after, was in zip(cpu_seconds(pid), before, strict=True))
    assert not summary.errors, summary.errors
    assert summary.e2e_s is not None
    assert summary.ttft_s is not None
    return {
        "requests_per_s": summary.requests_per_s,
        "p50_ms": 1000 * summary.e2e_s.p50,
        "first_ms": 1000 * summary.ttft_s.p50,
        "tokens_per_piece": summary.tokens_per_piece or 1.0,
        "front_us": own,
        "prepare_us": beside,
    }


def median_of(rounds: int, requests: int, concurrency: int, tokens: int = 32, output: int = 1, step_s: float = 0.0) -> dict[str, float]:
    found = [measure(requests, concurrency, tokens, output, step_s) for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of a prompt")
    parser.add_argument("--output", type=int, default=1, help="tokens of an answer")
    parser.add_argument("--step-ms", type=float, default=0.0, help="milliseconds between an engine's steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--engine", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve_front(options.serve[0], Path(options.serve[1])))
    elif options.engine:
        engine_of(options.engine, options.step_ms / 1000)
    else:
        asked = (options.requests, options.concurrency, options.tokens, options.output, options.step_ms / 1000)
        print(json.dumps(median_of(options.rounds, *asked), indent=1))


if __name__ == "__main__":
    main()
