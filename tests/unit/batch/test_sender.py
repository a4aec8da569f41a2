"""Single lines against a real HTTP server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from aiohttp import web

from banyan_runtime.batch.client import Answer
from banyan_runtime.batch.errors import AccessDenied, ModelNotFound, ServerGone
from banyan_runtime.batch.retries import RetryPolicy
from banyan_runtime.batch.sender import Expected, Failed, Outcome, Sender, Target
from tests.support.server.scripted import ScriptedServer, completion, obey, problem

QUICK = RetryPolicy(max_attempts=3, max_backoff_s=0.05, silence_s=5)


def body(prompt: str, **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": prompt}]} | more).encode()


def send(
    server: ScriptedServer,
    bodies: Sequence[bytes],
    policy: RetryPolicy = QUICK,
    *,
    expected: Expected | None = None,
    concurrency: int = 16,
    timeout_s: float = 30.0,
    meanwhile: Callable[[Sender], Awaitable[object]] | None = None,
) -> list[Outcome]:
    """The outcomes of all bodies, sent at once."""

    async def run() -> list[Outcome]:
        target = Target(server.url, "/v1/chat/completions", timeout_s=timeout_s, max_concurrency=concurrency)
        async with Sender(target, expected or Expected(len(bodies)), policy) as sender:
            tasks = [asyncio.ensure_future(sender.send(one, key=b"", order=n)) for n, one in enumerate(bodies)]
            if meanwhile is not None:
                await meanwhile(sender)
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    return uvloop.run(run())


def send_all(
    server: ScriptedServer,
    bodies: Sequence[bytes],
    policy: RetryPolicy = QUICK,
    *,
    expected: Expected | None = None,
    concurrency: int = 16,
) -> tuple[list[Outcome], BaseException | None]:
    """The outcomes that lines had, and what ended the run, if something did."""
    outcomes: list[Outcome] = []

    async def run() -> BaseException | None:
        target = Target(server.url, "/v1/chat/completions", max_concurrency=concurrency)
        async with Sender(target, expected or Expected(len(bodies)), policy) as sender:

            async def line(number: int) -> None:
                outcomes.append(await sender.send(bodies[number], key=b"", order=number))

            tasks = [asyncio.ensure_future(line(n)) for n in range(len(bodies))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            return next((error for task in done if (error := task.exception()) is not None), None)

    error = uvloop.run(run())
    return outcomes, error


def statuses(outcomes: Sequence[Outcome]) -> Counter[int | str]:
    return Counter(outcome.status if isinstance(outcome, Answer) else outcome.code for outcome in outcomes)


@pytest.fixture
def away(server: ScriptedServer) -> list[bool]:
    """While it holds true the server answers 500 to every line, though it says that it is ready."""
    switch = [True]

    async def handler(request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
        return problem(500, "away", None) if switch[0] else await obey(request, body, prompt, attempt)

    server.handler = handler
    return switch


@pytest.mark.matrix
@pytest.mark.parametrize("trouble", ["status 500", "status 503", "cut"])
def test_a_short_outage_burns_no_line(server: ScriptedServer, trouble: str) -> None:
    outage = [True]

    async def handler(request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
        return await obey(request, body, trouble if outage[0] else prompt, 1)

    async def end(sender: Sender) -> None:
        await asyncio.sleep(1.0)
        assert sender.load.waiting_for.startswith("the server")
        outage[0] = False

    server.handler = handler
    outcomes = send(server, [body(f"line {n}") for n in range(200)], RetryPolicy(max_attempts=3, max_backoff_s=0.1), meanwhile=end)
    assert statuses(outcomes) == {200: 200}
    assert sum(server.tries.values()) < 200 + 100, "one line at a time asks whether the server is back"


def test_what_fails_while_others_pass_ends_with_the_servers_last_answer(server: ScriptedServer) -> None:
    server.delay_s = 0.01
    outcomes = send(server, [body("status 500"), body("cut"), *(body(f"line {n}") for n in range(400))], concurrency=4)
    assert statuses(outcomes) == {200: 400, 500: 1, "server_error": 1}
    assert isinstance(outcomes[1], Failed)
    assert server.tries["status 500"] <= 6


def test_a_line_that_there_never_is_memory_for_ends_and_waits_as_long_as_it_is_told(server: ScriptedServer) -> None:
    """Whoever is in its steps is told the same, and answered the next time."""
    tried: dict[str, list[float]] = {}

    async def handler(request: web.Request, sent: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
        tried.setdefault(prompt, []).append(time.monotonic())
        if prompt == "poison" or (prompt == "line 3" and attempt == 1):
            return problem(503, "no memory", "out_of_memory", {"Retry-After": "1"})
        await asyncio.sleep(0.02)
        return await obey(request, sent, prompt, attempt)

    server.handler = handler
    outcomes = send(
        server, [body("poison"), *(body(f"line {n}") for n in range(400))], RetryPolicy(max_attempts=3, max_backoff_s=1.0), concurrency=2
    )
    assert statuses(outcomes) == {200: 400, 503: 1}
    times = tried["poison"]
    assert len(times) <= 4
    assert min(after - before for before, after in pairwise(times)) >= 1
    assert len(tried["line 3"]) == 2


def test_poison_lines_end_even_if_they_are_all_there_is(server: ScriptedServer) -> None:
    outcomes = send(server, [body("status 500"), body("cut"), body("nonsense")])
    assert statuses(outcomes) == {500: 1, "server_error": 2}


def test_a_line_that_always_times_out_ends_as_an_error(server: ScriptedServer) -> None:
    outcomes = send(server, [body("slow 30"), *(body(f"line {n}") for n in range(20))], timeout_s=0.2)
    assert statuses(outcomes) == {200: 20, "server_error": 1}
    assert isinstance(outcomes[0], Failed)


def test_a_server_that_is_away_for_good_is_gone_though_it_says_otherwise(server: ScriptedServer, away: list[bool]) -> None:
    with pytest.raises(ServerGone, match="status 500"):
        send(server, [body(f"line {n}") for n in range(2000)], RetryPolicy(max_attempts=5, max_backoff_s=0.1, silence_s=1.0))


def test_wrong_models_among_others_are_those_lines_errors(server: ScriptedServer) -> None:
    lines = [body(f"line {n}", model="absent" if n < 19 else "scripted") for n in range(100)]
    outcomes = send(server, lines, expected=Expected(100, frozenset({"absent", "scripted"})), concurrency=4)
    assert statuses(outcomes) == {200: 81, 404: 19}


def test_a_job_whose_every_model_is_unknown_ends(server: ScriptedServer) -> None:
    lines = [body(f"line {n}", model=f"absent-{n % 2}") for n in range(100)]
    with pytest.raises(ModelNotFound, match="absent"):
        send(server, lines, expected=Expected(100, frozenset({"absent-0", "absent-1"})))


@pytest.mark.parametrize("concurrency", [16, 2])
def test_a_wrong_key_ends_the_job_before_any_line_has_an_outcome(server: ScriptedServer, concurrency: int) -> None:
    server.api_key = "secret"
    outcomes, error = send_all(server, [body(f"line {n}") for n in range(100)], concurrency=concurrency)
    assert (outcomes, type(error)) == ([], AccessDenied)


def test_a_wrong_key_is_seen_with_one_line_at_a_time(server: ScriptedServer) -> None:
    server.api_key = "secret"
    outcomes, error = send_all(server, [body("line")], expected=Expected(100))
    assert (outcomes, type(error)) == ([], AccessDenied)


def test_refusals_at_the_start_are_tried_again_while_others_are_being_served(server: ScriptedServer) -> None:
    lines = [*(body(f"status {status} twice") for status in (401, 403, 405)), *(body(f"slow 0.{3 + n}") for n in range(5))]
    assert statuses(send(server, lines, RetryPolicy(max_attempts=5, max_backoff_s=0.02), expected=Expected(1000))) == {200: 8}


def test_one_line_that_is_refused_again_and_again_fails_no_job_while_others_are_being_served(server: ScriptedServer) -> None:
    lines = [body("status 403"), *(body(f"slow 1 {n}") for n in range(3))]
    outcomes, error = send_all(server, lines, RetryPolicy(max_attempts=3, max_backoff_s=0.02))
    assert (statuses(outcomes), error) == ({200: 3, 403: 1}, None)


class Refusing:
    """A server that serves 20 lines, then refuses what it gets, until it is told otherwise."""

    def __init__(self, server: ScriptedServer, status: int, code: str | None) -> None:
        self.answer = status, "refused", code
        self.over = False
        self.served = 0
        server.handler = self.handle

    async def handle(self, request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
        if self.served >= 20 and not self.over:
            return problem(*self.answer)
        self.served += 1
        return completion(prompt)

    async def end(self, sender: Sender) -> None:
        async with asyncio.timeout(10):
            while not sender.load.waiting_for:  # noqa: ASYNC110 - it is another thread's
                await asyncio.sleep(0.01)
        self.over = True


REFUSALS = [(401, None), (403, None), (404, None), (405, None), (404, "model_not_found")]
PATIENT = RetryPolicy(max_attempts=3, max_backoff_s=0.1, silence_s=20)


@pytest.mark.matrix
@pytest.mark.parametrize(("status", "code"), REFUSALS)
def test_a_spell_of_refusals_in_mid_run_burns_no_line(server: ScriptedServer, status: int, code: str | None) -> None:
    spell = Refusing(server, status, code)
    lines = [body(f"line {n}", model="scripted") for n in range(300)]
    expected = Expected(300, frozenset({"scripted", "other"}))
    assert statuses(send(server, lines, PATIENT, expected=expected, meanwhile=spell.end)) == {200: 300}
    assert sum(server.tries.values()) < 300 + 100, "one line at a time asks whether it is over"


@pytest.mark.matrix
@pytest.mark.parametrize(("status", "code"), REFUSALS)
def test_refusals_that_last_end_the_run_and_not_the_lines(server: ScriptedServer, status: int, code: str | None) -> None:
    Refusing(server, status, code)
    lines = [body(f"line {n}", model="scripted") for n in range(300)]
    policy = RetryPolicy(max_attempts=3, max_backoff_s=0.1, silence_s=0.5)
    outcomes, error = send_all(server, lines, policy, expected=Expected(300, frozenset({"scripted"})))
    assert statuses(outcomes) == {200: 20}
    assert isinstance(error, AccessDenied if status in (401, 403) else ModelNotFound)
    assert str(status) in str(error)


def send_while_rotated(server: ScriptedServer, count: int, kept: list[str], rotate: Callable[[], Awaitable[None]]) -> list[Outcome]:
    """The outcomes of so many lines, sent with the latest key that is `kept`."""

    async def run() -> list[Outcome]:
        target = Target(server.url, "/v1/chat/completions", kept[-1], max_concurrency=4, key_now=lambda: kept[-1])
        async with Sender(target, Expected(count), PATIENT) as sender:
            lines = [sender.send(body(f"line {n}"), key=b"", order=n) for n in range(count)]
            *outcomes, _ = await asyncio.gather(*lines, rotate())
            return outcomes

    return uvloop.run(run())


@pytest.mark.parametrize("there", [True, False])
def test_a_key_that_is_rotated_is_taken_from_where_it_is_kept(server: ScriptedServer, there: bool) -> None:
    """At once where it is there before the server refuses the old one, else as soon as it is."""
    kept = ["old"]
    server.api_key, server.delay_s = "old", 0.01

    async def rotate() -> None:
        async with asyncio.timeout(10):
            while len(server.tries) < 20:  # noqa: ASYNC110 - it is another thread's
                await asyncio.sleep(0.01)
        if there:
            kept.append("new")
        server.api_key = "new"
        await asyncio.sleep(0.5)
        kept.append("new")

    assert statuses(send_while_rotated(server, 300, kept, rotate)) == {200: 300}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer old", "Bearer new"}


@pytest.mark.long
def test_a_key_that_replicas_take_up_one_after_the_other_costs_no_line(server: ScriptedServer) -> None:
    """Ours may be newer than theirs: a kubelet brings a Secret when it comes to it."""
    kept, theirs = ["old"], ["old"] * 4
    server.delay_s = 0.005

    async def handler(request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
        fits = request.headers["Authorization"] == f"Bearer {theirs[int(prompt.split()[1]) % len(theirs)]}"  # each line at one of them
        return completion(prompt) if fits else problem(401, "Incorrect API key provided.", "invalid_api_key")

    server.handler = handler

    async def rotate() -> None:
        kept.append("new")
        for replica in range(len(theirs)):
            await asyncio.sleep(0.3)
            theirs[replica] = "new"

    assert statuses(send_while_rotated(server, 1500, kept, rotate)) == {200: 1500}


def test_a_line_that_is_refused_while_others_pass_ends_with_its_refusal(server: ScriptedServer) -> None:
    server.delay_s = 0.01
    lines = [body("status 403"), body("status 404"), *(body(f"line {n}") for n in range(400))]
    assert statuses(send(server, lines, concurrency=4)) == {200: 400, 403: 1, 404: 1}
    assert server.tries["status 403"] <= 6


@pytest.mark.matrix
@pytest.mark.parametrize("status", [301, 302, 401, 405])
def test_a_line_that_is_refused_when_all_others_are_done_ends_with_its_refusal(server: ScriptedServer, status: int) -> None:
    lines = [*(body(f"line {n}") for n in range(40)), body(f"status {status}")]
    began = time.monotonic()
    assert statuses(send(server, lines, RetryPolicy(max_attempts=3, max_backoff_s=0.1, silence_s=60))) == {200: 40, status: 1}
    assert time.monotonic() - began < 20


def test_the_last_lines_of_a_file_are_refused_for_what_is_in_them_by_a_server_that_is_ready(server: ScriptedServer) -> None:
    lines = [*(body(f"line {n}") for n in range(20)), *(body(f"status {(403, 404)[n % 2]} {n}") for n in range(10))]
    assert statuses(send(server, lines)) == {200: 20, 403: 5, 404: 5}
    refused = [tries for prompt, tries in server.tries.items() if prompt.startswith("status")]
    assert max(refused) <= QUICK.max_attempts + 1


def test_a_busy_server_gets_fewer_requests_and_every_line_is_answered(server: ScriptedServer) -> None:
    server.limit, server.delay_s = 4, 0.01
    outcomes = send(server, [body(f"line {n}") for n in range(300)], concurrency=64)
    assert statuses(outcomes) == {200: 300}
    assert sum(server.tries.values()) < 300 * 2


def test_a_cancelled_line_gives_its_turn_back(server: ScriptedServer) -> None:
    async def run() -> None:
        target = Target(server.url, "/v1/chat/completions", max_concurrency=1)
        async with Sender(target, Expected(3), QUICK) as sender:
            first, second = (asyncio.ensure_future(sender.send(body("slow 30"), key=b"", order=n)) for n in range(2))
            while not server.open:  # noqa: ASYNC110 - it is another thread's
                await asyncio.sleep(0.01)
            for task in (second, first):
                task.cancel()
            await asyncio.wait([first, second])
            assert isinstance(await sender.send(body("hello"), key=b"", order=2), Answer)
            assert sender.load.in_flight == 0

    uvloop.run(run())


def test_a_line_whose_probe_takes_long_does_not_hold_the_others_back(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.batch.sender.TRUST_S", 0.2)
    outage = [True]
    all_open = asyncio.Event()

    async def handler(request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
        """After the outage, answer no line before all of them are open, the probe among them."""
        if outage[0]:
            return problem(503, "away", None)
        if server.open == 16:
            all_open.set()
        await all_open.wait()
        return completion(prompt)

    async def end(sender: Sender) -> None:
        while not sender.load.waiting_for:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        outage[0] = False

    server.handler = handler
    assert statuses(send(server, [body(f"line {n}") for n in range(16)], meanwhile=end)) == {200: 16}
    assert all_open.is_set()


class Crashing:
    """A server that one line takes down: every open request is cut, and for a while it says that it is not ready."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.crashes = 0
        self.requests: list[web.Request] = []

    async def handle(self, request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
        if self.server.ready is not None:
            return problem(503, "starting", None)
        self.requests.append(request)
        try:
            await asyncio.sleep(0.02)
            if prompt == "crash":
                self.crash()
            return completion(prompt)
        finally:
            self.requests.remove(request)

    def crash(self) -> None:
        self.crashes += 1
        self.server.ready = {"state": "starting"}
        asyncio.get_running_loop().call_later(0.3, lambda: setattr(self.server, "ready", None))
        for request in self.requests:
            if request.transport is not None:
                request.transport.abort()


def test_a_line_that_takes_the_whole_server_down_is_found_out_and_the_others_are_answered(server: ScriptedServer) -> None:
    crashing = Crashing(server)
    server.handler = crashing.handle
    lines = [body("crash" if n == 30 else f"line {n}") for n in range(200)]
    outcomes = send(server, lines, RetryPolicy(max_attempts=5, max_backoff_s=0.1, silence_s=10))
    assert statuses(outcomes) == {200: 199, "server_error": 1}
    assert isinstance(outcomes[30], Failed)
    assert crashing.crashes <= 12


PODS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


class Pods:
    """Several servers on one port of different loopback addresses, as a headless Service gives them. Each counts its lines."""

    def __init__(self, *addresses: str) -> None:
        self.lines: Counter[str] = Counter(dict.fromkeys(addresses, 0))
        self.listed = list(addresses)
        self.port = 0
        self.busy = asyncio.Event()  # the first address has had 50 lines
        self._servers: dict[str, asyncio.Server] = {}
        self._open: dict[str, set[asyncio.StreamWriter]] = {address: set() for address in addresses}

    async def start(self) -> None:
        for address in self.lines:
            await self.revive(address)

    async def revive(self, address: str) -> None:
        server = await asyncio.start_server(lambda r, w: self._serve(address, r, w), address, self.port)
        self._servers[address] = server
        self.port = server.sockets[0].getsockname()[1]

    def kill(self, address: str) -> None:
        self._servers.pop(address).close()
        for writer in self._open[address]:
            writer.transport.abort()

    async def resolve(self, host: str, port: int) -> list[str]:
        return list(self.listed)

    async def _serve(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[address].add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
                await reader.readexactly(length)
                self.lines[address] += length > 0
                if self.lines[PODS[0]] >= 50:
                    self.busy.set()
                await asyncio.sleep(0.01)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + b'{"id":"x"}')
        self._open[address].discard(writer)
        writer.close()

    async def send(self, lines: int, meanwhile: Callable[[Sender], Awaitable[None]], *, keys: int = 1000) -> Counter[int | str]:
        policy = RetryPolicy(max_attempts=3, max_backoff_s=0.05)
        target = Target(f"http://pods.example:{self.port}", "/v1/x", max_concurrency=40, resolve=self.resolve)
        async with Sender(target, Expected(lines), policy) as sender:
            sends = [asyncio.ensure_future(sender.send(b"{}", key=b"%d" % (n % keys), order=n)) for n in range(lines)]
            await meanwhile(sender)
            return statuses(await asyncio.gather(*sends))

    def stop(self) -> None:
        for address in list(self._servers):
            self.kill(address)


def with_pods(lines: int, meanwhile: Callable[[Pods, Sender], Awaitable[None]]) -> tuple[Counter[int | str], Counter[str]]:
    async def run() -> tuple[Counter[int | str], Counter[str]]:
        pods = Pods(*PODS)
        await pods.start()
        try:
            return await pods.send(lines, lambda sender: meanwhile(pods, sender)), pods.lines
        finally:
            pods.stop()

    return uvloop.run(run())


async def nothing(pods: Pods, sender: Sender) -> None:
    pass


def test_lines_are_spread_over_all_addresses_of_the_servers_name() -> None:
    outcomes, lines = with_pods(900, nothing)
    assert outcomes == {200: 900}
    assert min(lines.values()) > 200


def test_a_pod_that_dies_costs_no_line_and_the_others_go_on() -> None:
    async def kill(pods: Pods, sender: Sender) -> None:
        await pods.busy.wait()
        pods.kill(PODS[0])

    outcomes, lines = with_pods(900, kill)
    assert outcomes == {200: 900}
    assert lines[PODS[0]] < 150
    assert lines.total() < 1000, "what was cut is sent again, and nothing else"


def test_a_pod_that_left_the_service_gets_no_new_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.batch.endpoints.RESOLVE_S", 0.05)
    after = 0

    async def leave(pods: Pods, sender: Sender) -> None:
        nonlocal after
        await pods.busy.wait()
        pods.listed.remove(PODS[0])
        await asyncio.sleep(0.3)
        after = pods.lines[PODS[0]]

    outcomes, lines = with_pods(1500, leave)
    assert outcomes == {200: 1500}
    assert lines[PODS[0]] - after <= 15
