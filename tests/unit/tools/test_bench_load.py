"""The load generator: what it asks follows from a name and a seed, what it tells follows from what came, and it reads real HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "benchmarks"
PACKAGES = ("load", "comparison", "peers")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]


# --- cases ---


def test_a_case_is_the_same_requests_for_the_same_seed_and_others_for_another() -> None:
    from load.cases import plans

    for case in ("bs1", "conc16", "poisson:3", "sharegpt", "prefix", "turns", "prefill8k", "offline"):
        assert plans(case, 1) == plans(case, 1)
        assert plans(case, 1) != plans(case, 2)


def test_the_seed_of_one_case_never_gives_the_prompts_of_another() -> None:
    from load.cases import plans

    assert plans("conc16", 1)[0].asks[0].prompt != plans("conc64", 1)[0].asks[0].prompt


def test_a_closed_loop_has_as_many_streams_as_its_name_says() -> None:
    from load.cases import plans

    [plan] = plans("conc24", 0)
    assert (plan.concurrent, len(plan.sessions)) == (24, 48)
    assert {(len(ask.prompt), ask.max_tokens) for ask in plan.asks} == {(128, 64)}


def test_a_shared_prefix_is_sent_cold_and_then_warm_with_other_own_tokens() -> None:
    from load.cases import plans

    cold, warm = plans("prefix", 5)
    prompts = [ask.prompt for ask in cold.asks + warm.asks]
    assert [plan.name for plan in (cold, warm)] == ["prefix cold", "prefix warm"]
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len({prompt[1024:] for prompt in prompts}) == 32
    assert {len(prompt) for prompt in prompts} == {1056}


def test_requests_at_random_times_come_at_the_rate_that_was_asked() -> None:
    from load.cases import plans

    due = [session.due_s for seed in range(40) for session in plans("poisson:4", seed)[0].sessions[-1:]]
    assert sum(due) / len(due) == pytest.approx(63 / 4, rel=0.1)


def test_sharegpt_like_lengths_have_their_medians_and_stay_within_their_limits() -> None:
    from load.cases import plans

    asks = plans("sharegpt2000", 3)[0].asks
    prompts, outputs = sorted(len(ask.prompt) for ask in asks), sorted(ask.max_tokens for ask in asks)
    assert prompts[1000] == pytest.approx(160, rel=0.15)
    assert outputs[1000] == pytest.approx(200, rel=0.15)
    assert (prompts[-1], outputs[-1]) == (2048, 1024)


@pytest.mark.parametrize("name", ["", "bs2", "conc", "conc0", "poisson", "poisson:0", "prefill", "prefill8", "prefix:3", "nothing"])
def test_an_unknown_case_is_refused_with_the_list_of_those_there_are(name: str) -> None:
    from load.cases import UnknownCase, plans

    with pytest.raises(UnknownCase, match="prefill8k"):
        plans(name, 0)


# --- numbers ---


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    from load.summary import percentile

    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(number) for number in range(101)], 99) == 99.0


def test_a_summary_is_what_the_samples_say() -> None:
    from load.sample import Played, Sample
    from load.summary import Summary

    first = Sample(0, 0.0, [0.5, 0.6, 0.7], 0.8, prompt_tokens=100, output_tokens=5, cached_tokens=0)
    later = Sample(1, 1.0, [1.1, 1.3], 1.4, prompt_tokens=100, output_tokens=2, cached_tokens=80)
    failed = Sample(0, 0.0, error="HTTP 429: busy")
    summary = Summary.of(Played([first, later, failed], wall_s=2.0, client_cpu_s=0.25))
    assert (summary.requests, summary.errors, summary.output_tokens) == (3, {"HTTP 429: busy": 1}, 7)
    assert (summary.output_tokens_per_s, summary.requests_per_s) == (3.5, 1.0)
    assert summary.ttft_s is not None
    assert summary.later_ttft_s is not None
    assert summary.tpot_s is not None
    assert summary.ttft_s.p50 == pytest.approx(0.3)
    assert summary.later_ttft_s.p50 == pytest.approx(0.1)
    assert summary.tpot_s.p50 == pytest.approx((0.2 / 4 + 0.2) / 2)  # by tokens: the first request's pieces hold more than one
    assert summary.cache_hit_rate == 0.4
    assert summary.good_per_s == 0.5  # the later one needs 200 ms a token


# --- over HTTP ---


def chunk(text: str = "", usage: dict[str, Any] | None = None) -> bytes:
    body: dict[str, Any] = {"choices": [] if usage else [{"index": 0, "text": text}], "usage": usage}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


USAGE = {"prompt_tokens": 128, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
STREAM = chunk("a") + chunk("é") + chunk("") + chunk(usage=USAGE) + b"data: [DONE]\n\n"


def chunked(data: bytes, size: int) -> bytes:
    """An answer in HTTP chunks of `size` bytes, which cut lines and characters anywhere."""
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for at in range(0, len(data), size) if (part := data[at : at + size]))
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"


Answerer = Callable[[dict[str, Any], int], tuple[bytes, bool]]


async def against(answerer: Answerer, case: str, seed: int = 0, concurrent: int = 4) -> tuple[Any, list[dict[str, Any]]]:
    """Play a case against a server on a real socket; `answerer` gets a body and its number, and returns an answer and whether to close."""
    from load.cases import plans
    from load.client import Server
    from load.play import play

    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            bodies.append(json.loads(await reader.readexactly(length)))
            answer, close = answerer(bodies[-1], len(bodies))
            writer.write(answer)
            if close:
                return writer.close()

    listening = await asyncio.start_server(lambda r, w: _quietly(serve(r, w)), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", "m", extra={"ignore_eos": True})
    try:
        return await play(plans(case, seed)[0], server), bodies
    finally:
        server.close()
        listening.close()


async def _quietly(serving: Any) -> None:
    try:
        await serving
    except (asyncio.IncompleteReadError, ConnectionError):
        pass


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_is_read_however_it_is_cut(size: int) -> None:
    played, bodies = asyncio.run(against(lambda *_: (chunked(STREAM, size), False), "bs1"))
    assert [(sample.error, sample.output_tokens, sample.prompt_tokens, sample.cached_tokens) for sample in played.samples] == [
        ("", 3, 128, 64)
    ] * 4
    assert [len(sample.pieces) for sample in played.samples] == [2] * 4
    assert all(sample.sent <= sample.pieces[0] <= sample.pieces[-1] <= sample.ended for sample in played.samples)
    assert (len(bodies[0]["prompt"]), bodies[0]["max_tokens"], bodies[0]["ignore_eos"], bodies[0]["stream"]) == (128, 64, True, True)


def test_a_server_that_closes_after_each_answer_loses_no_request() -> None:
    played, bodies = asyncio.run(against(lambda *_: (chunked(STREAM, 100), True), "conc4"))
    assert [sample.error for sample in played.samples] == [""] * 8
    assert len(bodies) == 8


def test_refusals_broken_streams_and_errors_in_a_stream_are_counted_not_raised() -> None:
    answers = [
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy", False),
        (chunked(STREAM, 50)[:120], True),
        (chunked(b'data: {"error": {"message": "out of memory"}}\n\n', 50), False),
        (chunked(STREAM, 50), False),
    ]
    played, _ = asyncio.run(against(lambda _, number: answers[number - 1], "bs1"))
    errors = [sample.error for sample in played.samples]
    assert errors[0] == "HTTP 429: busy"
    assert "lost" in errors[1]
    assert "out of memory" in errors[2]
    assert errors[3] == ""


def test_a_conversation_sends_all_that_was_said_before() -> None:
    played, bodies = asyncio.run(against(lambda *_: (chunked(STREAM, 100), False), "turns1"))
    prompts = [body["prompt"] for body in bodies]
    assert [sample.turn for sample in played.samples] == [0, 1, 2, 3, 4, 5]
    assert all(later.startswith(earlier + "aé") for earlier, later in pairwise(prompts))
