"""CPU time of the front process per streamed token: chat completions, one token a step and stream.

    python benchmarks/front.py [--streams 256] [--tokens 200] [--interval-ms 8] [--rounds 5] [--out FILE.json]

The front is the real one (application, counters, HTTP server with uvloop, link) in a process of its own; the engine at
the other end of its wire is played by this process, and so are the clients, which read raw sockets. A step comes every few
milliseconds, so that each is a wake-up and a write of its own, as with a real engine; where writing takes more than half of the
time, pieces carry several tokens, which is told. What is counted is the CPU time of all
threads of the front, kernel included, between the first and the last step; the median of the rounds is told. `--compare TREE`
takes turns with the front of another checkout (A B A B ...), given a file benchmarks/front.py that starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers
import uvloop
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.app import create_app
from banyan_runtime.front.context import Context
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.ops.http import HttpCounter
from banyan_runtime.front.plan import Endpoint, Plan, Preparer
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.state import ServerState
from banyan_runtime.front.text.text import Text
from banyan_runtime.link import Link
from banyan_runtime.server.http import HttpServer

WARM_UP_STEPS = 20
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
BODY = json.dumps({"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "max_tokens": 1900}).encode()
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
INFO = wire.EngineInfo(
    architecture="Qwen3ForCausalLM", model_type="qwen3", dtype="float32", device="cpu", attention_backend="torch_native",
    vocab_size=257, context_len=2048, max_model_len=2048, page_size=1, max_total_tokens=1 << 20, max_req_input_len=2047,
    max_running_requests=4096, weights_bytes=1, kv_bytes=1,
)  # fmt: skip


# --- the front ---


def write_model(folder: Path) -> None:
    """Text files of a model whose tokens are bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = AddedToken("<|end|>", special=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["hello"], trainers.BpeTrainer(vocab_size=257, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))


class Inline(Preparer):
    """Plans made at once, in the front's own process: what the others cost is no part of this benchmark."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        return self._planner.plan(endpoint, body, request_id)


async def serve_front(address: str, folder: Path) -> None:
    """Be the front; prints the port once requests can come."""
    config, state, client = ServerConfig(model_path=str(folder)), ServerState("front"), EngineClient()
    metrics = Metrics("front", state)
    client.on_inter_token_latency = metrics.inter_token_latency
    client.bind(address)
    info = await client.wait_ready()
    text = Text.load(config, folder)
    context = Context(config, client, text, metrics, state, Inline(Planner(config, text, info)))
    state.enter("ready")
    counter = HttpCounter(create_app(context), metrics)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        print(listening.getsockname()[1], flush=True)
        await HttpServer(counter).serve([listening])


# --- engine and clients ---


class Reader:
    """One client; counts the events of its stream that carry something. Nobody waits for its socket, so a write wakes nobody up: that
    would be a cost of this benchmark (several microseconds on a virtual machine), not of the front."""

    def __init__(self, port: int) -> None:
        self.events = 0
        self.ended = False
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(HEAD.format(len(BODY)).encode() + BODY)
        self._socket.setblocking(False)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self._socket.recv(1 << 20)
            self.events += data.count(b"data: {")
            self.ended = data.endswith(b"0\r\n\r\n")  # of the chunks


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, user and kernel."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def settled(pid: int) -> float:
    """The CPU time of a process when it has done what it had to do."""
    before, now = -1.0, cpu_seconds(pid)
    while now - before > 0.001:
        time.sleep(0.1)
        before, now = now, cpu_seconds(pid)
    return now


def measure(tree: Path, streams: int, tokens: int, interval_s: float) -> float:
    """Microseconds of the front's CPU time for each streamed token."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        address = f"{folder}/engine"
        path = os.pathsep.join([str(tree / "runtime"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(tree / "benchmarks/front.py"), "--serve", address, folder]
        front = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            engine = connected(address)
            engine.send(wire.encode(wire.Ready(INFO)))
            assert front.stdout is not None
            port = int(front.stdout.readline())
            readers, ids = [], []
            for _ in range(streams):
                readers.append(Reader(port))
                ids.append(submitted(engine))
            started, due = 0.0, time.monotonic()
            for step in range(WARM_UP_STEPS + tokens):
                if step == WARM_UP_STEPS:
                    started, due = settled(front.pid), time.monotonic()
                engine.send(wire.encode(wire.StepOutput(ids, wire.pack_ids([40 + step % 60] * streams))))
                due += interval_s
                time.sleep(max(0.0, due - time.monotonic()))
                for reader in readers:
                    reader.read()
            spent = settled(front.pid) - started
            engine.send(wire.encode(wire.StepOutput([], b"", ends(ids))))
            while not all(reader.ended for reader in readers):
                time.sleep(0.05)
                for reader in readers:
                    reader.read()
            pieces = sum(reader.events for reader in readers) / streams - 2  # those with the role, and the end
            print(f"{(WARM_UP_STEPS + tokens) / pieces:.2f} tokens in a piece", file=sys.stderr)
            return spent / (streams * tokens) * 1e6
        finally:
            front.kill()
            front.wait()


def connected(address: str) -> Link:
    """The engine's end of the front's link, which is there soon after the front was started."""
    while True:
        try:
            return Link.connect(address)
        except OSError:
            time.sleep(0.01)


def ends(ids: list[int]) -> list[wire.Finish]:
    """Those of requests that have all their tokens."""
    return [wire.Finish(one, wire.FinishCode.LENGTH, 0, 0.0, 0.0, 0) for one in ids]


def submitted(engine: Link) -> int:
    """The id of the next request, which is the only one on its way."""
    while not (raws := engine.receive()):
        select.select([engine], [], [])
    (message,) = map(wire.decode_front, raws)
    assert isinstance(message, wire.Submit)
    return message.id


def compare(options: argparse.Namespace) -> dict[str, Any]:
    trees = [Path(__file__).parents[1], *options.compare]
    found: dict[str, list[float]] = {str(tree): [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees:
            value = measure(tree, options.streams, options.tokens, options.interval_ms / 1000)
            found[str(tree)].append(round(value, 2))
            print(f"round {number + 1}: {value:5.2f} us per token  {tree}", flush=True)
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "streams": options.streams,
        "steps": options.tokens,
        "interval_ms": options.interval_ms,
        "us_per_token": found,
        "median": {tree: statistics.median(values) for tree, values in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="steps that are measured")
    parser.add_argument("--interval-ms", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compare", type=Path, nargs="*", default=[], metavar="TREE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve_front(options.serve[0], Path(options.serve[1])))
        return
    result = compare(options)
    print(json.dumps(result["median"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
