"""Cutting a text in every way that a stream may cut it, small tokenizers made on the spot, and an engine that tests play."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import uvicorn
import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.app import create_app
from banyan_runtime.front.context import Context
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.logprobs import Cells
from banyan_runtime.front.metrics import Metrics, RequestRecord
from banyan_runtime.front.plan import Endpoint, Plan
from banyan_runtime.front.state import ServerState
from banyan_runtime.front.text.defaults import GenerationDefaults
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.text.tokenizer import Tokenizer as OurTokenizer
from banyan_runtime.link import Link

T = TypeVar("T")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def splits(text: str, shuffled: int = 40) -> Iterator[list[str]]:
    """The text in one delta, in single characters, in every two deltas, and in random deltas."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    dice = random.Random(len(text))
    for _ in range(shuffled):
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(1, 6)))
        yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def engine_info(**changes: Any) -> wire.EngineInfo:
    """What an engine with room for 2,048 tokens says of itself."""
    facts: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "torch_native",
        "vocab_size": 100,
        "context_len": 2048,
        "max_model_len": 2048,
        "page_size": 1,
        "max_total_tokens": 8192,
        "max_req_input_len": 2042,
        "max_running_requests": 4,
        "weights_bytes": 0,
        "kv_bytes": 0,
    }
    return wire.EngineInfo(**{**facts, **changes})


@functools.cache
def ours(folder: Path) -> OurTokenizer:
    return OurTokenizer.load(folder)


@functools.cache
def reference(folder: Path) -> Any:
    """The same tokenizer as transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def byte_level(folder: Path, *, added: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **settings: object) -> Path:
    """Write a byte-level tokenizer whose ids 0, 1 … are `added`, followed by the 256 bytes."""
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(added),
        special_tokens=[AddedToken(text, special=True) for text in added],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello"], trainer)
    return _write(folder, tokenizer, {"eos_token": "<|im_end|>", "chat_template": CHATML, **settings})


def byte_fallback(folder: Path) -> Path:
    """Write a SentencePiece-like tokenizer: `▁` for a space, `<0xNN>` for bytes that no delta covers."""
    deltas = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "你", "▁a"]
    vocabulary = {delta: index for index, delta in enumerate(deltas)}
    tokenizer = Tokenizer(kinds.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _write(folder, tokenizer, {"eos_token": "</s>", "bos_token": "<s>"})


def word_pieces(folder: Path) -> Path:
    """Write a WordPiece tokenizer: its decoder has rules of its own, so no token has bytes."""
    words = ["[UNK]", "play", "##ing", "##ed", "chess", "and", "!"]
    tokenizer = Tokenizer(kinds.WordPiece(vocab={word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _write(folder, tokenizer, {})


def _write(folder: Path, tokenizer: Tokenizer, settings: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# --- an engine that tests play ---

INFO = wire.EngineInfo(
    architecture="Qwen3ForCausalLM", model_type="qwen3", dtype="float32", device="cpu", attention_backend="torch_native",
    vocab_size=259, context_len=2048, max_model_len=2048, page_size=1, max_total_tokens=8192, max_req_input_len=2047,
    max_running_requests=256, weights_bytes=1, kv_bytes=1,
)  # fmt: skip
STATS = wire.Stats(
    running=3, waiting=5, held=0, kv_used=2048, kv_evictable=1024, kv_free=5120, last_step_unix=1_750_000_000.5,
    prompt_tokens_computed=11, prompt_tokens_cached=22, generation_tokens=33, preemptions=1, preempted_tokens=44, evicted_tokens=55,
    gen_throughput=6.25, prefill=wire.StepStats(0, wire.HistogramCounts([]), wire.HistogramCounts([])),
    decode=wire.StepStats(0, wire.HistogramCounts([]), wire.HistogramCounts([])), cpu_seconds=9.5, resident_bytes=4096,
)  # fmt: skip
LIMIT_S = 20.0


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    """Run one scenario on the loop that the server uses; it may not take longer than 20 s."""

    async def bounded() -> T:
        async with asyncio.timeout(LIMIT_S):
            return await scenario()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bounded())


def finish(request_id: int, code: wire.FinishCode = wire.FinishCode.LENGTH, **numbers: Any) -> wire.Finish:
    return wire.Finish(request_id, code, **{"cached_tokens": 2, "queue_s": 0.25, "prefill_s": 0.5, "retractions": 0, **numbers})


def columns(values: Sequence[float], tops: Sequence[Sequence[tuple[int, float]]] = ()) -> wire.LogprobColumns:
    """Log probabilities as the engine sends them; `tops`: as many (id, value) pairs for each."""
    width = len(tops[0]) if tops else 0
    ids = [token_id for row in tops for token_id, _ in row]
    likely = [value for row in tops for _, value in row]
    return wire.LogprobColumns(_floats(values), width, wire.pack_ids(ids), _floats(likely))


def _floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


Score = tuple[int, float | None]


def scores(cells: Iterable[Cells]) -> list[list[Score]]:
    """Of each token: itself and the likeliest ones, with their log probabilities."""
    found: list[list[Score]] = []
    for each in cells:
        values = np.full(each.ids.shape, None) if each.values is None else each.values
        rows = zip(each.ids.tolist(), values.tolist(), strict=True)
        found += [list(zip(ids, row, strict=True)) for ids, row in rows]
    return found


class FakeEngine:
    """The other end of a real wire, played by the test: `async with FakeEngine(folder) as engine`.

    `client` is the front's end, ready for requests.
    """

    def __init__(self, folder: Path, **options: int) -> None:
        self.client = EngineClient(**options)
        self._address = f"{folder}/engine"
        self._heard: deque[bytes] = deque()

    async def __aenter__(self) -> Self:
        self.client.bind(self._address)
        self.link = Link.connect(self._address)
        await self.send(wire.Ready(INFO))
        await self.client.wait_ready()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self.client.close()

    async def send(self, *messages: wire.EngineMessage) -> None:
        for message in messages:
            self.link.send(wire.encode(message))
            while self.link.unsent:
                await asyncio.sleep(0.001)
                self.link.flush()

    async def step(self, rows: Mapping[int, Sequence[int]] | None = None, *finished: wire.Finish, **columns: Any) -> None:
        """One step: tokens by request, in this order, and requests that end with it."""
        rows = rows or {}
        tokens = [token for row in rows.values() for token in row]
        counts = [] if all(len(row) == 1 for row in rows.values()) else [len(row) for row in rows.values()]
        await self.send(wire.StepOutput(list(rows), wire.pack_ids(tokens), list(finished), counts=counts, **columns))

    async def next(self) -> wire.FrontMessage:
        """The front's next message."""
        while not self._heard:
            self._heard += self.link.receive()
            if not self._heard:
                await asyncio.sleep(0.001)
        return wire.decode_front(self._heard.popleft())

    async def submits(self, number: int = 1) -> list[wire.Submit]:
        """The front's next messages, which are new requests."""
        messages = [await self.next() for _ in range(number)]
        assert all(isinstance(message, wire.Submit) for message in messages), messages
        return messages  # type: ignore[return-value]

    async def submitted(self) -> int:
        """The id of the request that comes next."""
        return (await self.submits())[0].id

    async def aborted(self) -> int:
        """The id of the request whose end is asked for next."""
        message = await self.next()
        assert isinstance(message, wire.Abort), message
        return message.id

    def kill(self) -> None:
        """Vanish, as a killed process does."""
        self.link.close()


class Planned:
    """A preparer whose plans are made by the test."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        return self.plans.pop(0)


class Front:
    """A front process's parts around a played engine; `records` are the requests as they were counted."""

    def __init__(self, engine: FakeEngine, tokenizer: OurTokenizer | None, **options: Any) -> None:
        self.engine = engine
        self.records: list[RequestRecord] = []
        state = ServerState("tiny")
        state.enter("ready")
        metrics = Metrics("tiny", state)
        metrics.request_finished = self.records.append  # type: ignore[method-assign]
        self.rejections: list[str] = []
        metrics.rejected = self.rejections.append  # type: ignore[method-assign]
        self.preparer = Planned()
        defaults = GenerationDefaults(openai={}, native={}, eos_ids=frozenset({2}))
        text = Text(tokenizer, None, defaults, None, None, frozenset(), frozenset(), {})
        config = ServerConfig(model_path="tiny", served_model_name=("tiny",))
        self.context = Context(config, engine.client, text, metrics, state, self.preparer)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[tuple[str, int]]:
        """Serve the application on a free port of this machine: (host, port)."""
        config = uvicorn.Config(create_app(self.context), http="httptools", ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server._serve([listening]))
            try:
                yield listening.getsockname()
            finally:
                server.should_exit = server.force_exit = True
                await serving


class Connection:
    """A client's socket: what it sends and reads, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @staticmethod
    async def post(address: tuple[str, int], path: str, body: bytes = b"{}") -> Connection:
        reader, writer = await asyncio.open_connection(*address)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return Connection(reader, writer)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer."""
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines if line)

    async def chunk(self) -> str:
        """The next write of a stream; "" at its end."""
        size = int(await self._reader.readline(), 16)
        return (await self._reader.readexactly(size + 2))[:-2].decode()

    async def events(self) -> list[Any]:
        """Everything up to [DONE], comments left out."""
        text = ""
        while piece := await self.chunk():
            text += piece
        *found, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in found if not event.startswith(":")]

    async def json(self) -> Any:
        """The body of a whole answer, which is sent in chunks where it is long."""
        _, headers = await self.head()
        if "content-length" not in headers:
            body = ""
            while piece := await self.chunk():
                body += piece
            return json.loads(body)
        return json.loads(await self._reader.readexactly(int(headers["content-length"])))

    def close(self) -> None:
        self._writer.close()
