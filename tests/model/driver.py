"""A small hand-written scheduler for parity tests: it cuts prompts into chunks, mixes rows, and shares prefixes, as told.

The real engine has its own parity test; this one exists so that the model is held to transformers without it, in schedules
that the engine would rarely choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from banyan_runtime.step import History, Runner, SamplingColumns, Step


@dataclass
class Request:
    prompt: list[int]
    new_tokens: int
    row: int
    start: int = 0  # turn in which it arrives
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    banned: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    computed: int = 0  # tokens in the cache

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return len(self.output) >= self.new_tokens

    @property
    def penalized(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


class Driver:
    """Rows, slots and steps for a fixed set of requests; slots are handed out in a shuffled order, page by page."""

    def __init__(self, runner: Runner, rows: int, context: int, page_size: int = 1, shuffle: int = 0) -> None:
        self.runner = runner
        self.page_size = page_size
        width = -(-context // page_size) * page_size
        # What no request owns yet is garbage on purpose: only the first kv_lens cells of a row mean anything.
        self.table = np.full((rows, width), 1, dtype=np.int32)
        pages = np.arange(1, runner.info.pool_tokens // page_size + 1)
        np.random.default_rng(shuffle).shuffle(pages)
        self.free = pages.tolist()

    def hold(self, request: Request, length: int) -> None:
        """Give the row slots for its first `length` positions."""
        size = self.page_size
        have = -(-request.computed // size)
        for page in range(have, -(-length // size)):
            self.table[request.row, page * size : (page + 1) * size] = self.free.pop() * size + np.arange(size)

    def share(self, source: Request, target: Request, length: int) -> None:
        """Let a row start behind another's prefix; whole pages only."""
        length = length // self.page_size * self.page_size
        assert source.tokens[:length] == target.tokens[:length]
        assert length <= source.computed
        self.table[target.row, :length] = self.table[source.row, :length]
        target.computed = length

    def build(self, work: list[tuple[Request, int]]) -> Step:
        """The step that computes the next `count` tokens of each request; it samples where nothing of the text is left."""
        for request, count in work:
            self.hold(request, request.computed + count)
        starts = [request.computed for request, _ in work]
        ends = [request.computed + count for request, count in work]
        samples = [end == len(request.tokens) for (request, _), end in zip(work, ends, strict=True)]
        return Step(
            mode="decode" if all(count == 1 for _, count in work) else "prefill",
            token_ids=np.concatenate([np.array(r.tokens[s:e], np.int32) for (r, _), s, e in zip(work, starts, ends, strict=True)]),
            positions=np.concatenate([np.arange(s, e, dtype=np.int32) for s, e in zip(starts, ends, strict=True)]),
            out_slots=np.concatenate([self.table[r.row, s:e] for (r, _), s, e in zip(work, starts, ends, strict=True)]),
            rows=np.array([r.row for r, _ in work], np.int32),
            query_lens=np.array([count for _, count in work], np.int32),
            kv_lens=np.array(ends, np.int32),
            samples=np.array(samples),
            sampling=columns([request for request, _ in work]),
            table=self.table,
            page_size=self.page_size,
        )

    def step(self, work: list[tuple[Request, int]]) -> None:
        step = self.build(work)
        result = self.runner.launch(step).result()
        for index, (request, count) in enumerate(work):
            request.computed += count
            if step.samples[index]:
                assert not result.failed[index]
                request.output.append(int(result.token_ids[index]))
            else:
                assert result.token_ids[index] == -1

    def run(self, requests: list[Request], chunk: int = 1 << 30) -> None:
        """Until all are done: prompts first, at most `chunk` tokens of one prompt a turn; then one decode of all others."""
        turn = 0
        while not all(request.done for request in requests):
            here = [r for r in requests if r.start <= turn and not r.done]
            prompts = [(r, min(chunk, len(r.tokens) - r.computed)) for r in here if not r.output]
            decodes = [(r, 1) for r in here if r.output]
            if prompts:
                self.step(prompts)
            if decodes:
                self.step(decodes)
            turn += 1


def columns(requests: list[Request]) -> SamplingColumns:
    def floats(name: str) -> np.ndarray:
        return np.array([getattr(r, name) for r in requests], np.float32)

    return SamplingColumns(
        temperature=floats("temperature"),
        top_k=np.array([r.top_k for r in requests], np.int32),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        frequency_penalty=floats("frequency_penalty"),
        presence_penalty=floats("presence_penalty"),
        repetition_penalty=floats("repetition_penalty"),
        seed=np.array([r.seed for r in requests], np.uint64),
        histories=[History(np.array(r.prompt, np.int32), np.array(r.output, np.int32)) if r.penalized else None for r in requests],
        banned=[np.array(r.banned, np.int32) if r.banned else None for r in requests],
    )
