"""Milliseconds to the first token of a lone stream, of a model that computes next to nothing: what HTTP, planning, wire and scheduler cost.

    python benchmarks/first_token.py [--requests 400] [--tokens 128] [--pause-ms 20] [--compare TREE ...] [--flags="--disable-radix-cache"]

Real servers, a client on a raw socket, prompts of new token ids, one request at a time. `--compare TREE`: servers of other checkouts run
beside this one's, and requests go to them in turns, in an order that is drawn, for such a machine's speed changes within seconds.
With a pause (what people leave) processes wake up from rest, and take longer over everything than in a closed loop (--pause-ms 0).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from load.cases import IDS
from served import served
from shapes import write_tokenizer

ROOT: Final = Path(__file__).parents[1]
WARM_UP: Final = 100  # requests
OUTPUT_TOKENS: Final = 4
SHAPE: Final = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 4096, "dtype": "float32", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "vocab_size": IDS.stop, "tie_word_embeddings": True,
}  # fmt: skip


def request(dice: random.Random, tokens: int) -> bytes:
    """Head and body."""
    fields = {
        "model": "m", "prompt": dice.choices(IDS, k=tokens), "max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = json.dumps(fields, separators=(",", ":")).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def first_token(connection: socket.socket, asked: bytes) -> float:
    """Milliseconds until the first event is there; returns when the answer is complete."""
    begun = time.perf_counter()
    connection.sendall(asked)
    come = b""
    while b"data: {" not in come:
        come += connection.recv(1 << 16)
    taken = time.perf_counter() - begun
    assert come.startswith(b"HTTP/1.1 200"), come
    while not come.endswith(b"0\r\n\r\n"):
        come += connection.recv(1 << 16)
    return 1000 * taken


def measure(trees: list[Path], requests: int, tokens: int, pause_s: float, flags: list[str]) -> dict[Path, list[float]]:
    dice, found = random.Random(0), {tree: list[float]() for tree in trees}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps(SHAPE))
        write_tokenizer(IDS.stop, folder)
        connections = {}
        for tree in trees:
            os.environ["PYTHONPATH"] = str(tree / "runtime")
            _, url = stack.enter_context(served(folder, "--load-format", "dummy", "--device", "cpu", *flags))
            parts = urlsplit(url)
            connections[tree] = stack.enter_context(socket.create_connection((parts.hostname, parts.port)))
        for number in range(-WARM_UP, requests):
            for tree in dice.sample(trees, len(trees)):
                time.sleep(pause_s)
                taken = first_token(connections[tree], request(dice, tokens))
                if number >= 0:
                    found[tree].append(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="before each request")
    parser.add_argument("--compare", type=Path, nargs="*", default=[], metavar="TREE")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more options of the server")
    options = parser.parse_args()
    trees = [ROOT, *(tree.resolve() for tree in options.compare)]
    for tree, times in measure(trees, options.requests, options.tokens, options.pause_ms / 1000, options.flags).items():
        tenths = statistics.quantiles(times, n=10)
        print(f"first token, ms: p10 {tenths[0]:.2f}, p50 {statistics.median(times):.2f}, p90 {tenths[8]:.2f}  {tree}")


if __name__ == "__main__":
    main()
