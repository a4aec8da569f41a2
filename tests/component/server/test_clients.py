"""What each of an engine's clients hears: its own requests' part of a step, in the form of a step of its own."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime import wire
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.logprobs import rows_of
from banyan_runtime.link import Link
from banyan_runtime.server.clients import UNSENT_MESSAGES, Clients, Wake, parted, recipient


def number(client: int, small: int) -> int:
    return (client << wire.CLIENT_BITS) + small


@st.composite
def outputs(draw: st.DrawFn) -> wire.StepOutput:
    owners = draw(st.lists(st.integers(0, 3), max_size=12))
    ids = [number(owner, at + 1) for at, owner in enumerate(owners)]
    counts = draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids))) if draw(st.booleans()) else []
    total = sum(counts) if counts else len(ids)
    tokens = np.arange(100, 100 + total, dtype=np.int32)
    scored = sorted(draw(st.sets(st.integers(0, total - 1)))) if total else []
    width = draw(st.integers(0, 3))
    columns = wire.LogprobColumns(
        np.arange(len(scored), dtype="<f4").tobytes(),
        width,
        np.arange(len(scored) * width, dtype="<i4").tobytes(),
        np.arange(len(scored) * width, dtype="<f4").tobytes(),
    )
    others = st.lists(st.tuples(st.integers(0, 3), st.integers(50, 60)), max_size=3, unique=True)
    empty = wire.LogprobColumns(b"", 0, b"", b"")
    return wire.StepOutput(
        ids=ids,
        token_ids=wire.pack_ids(tokens),
        counts=counts,
        finished=[wire.Finish(number(*each), wire.FinishCode.STOP, 0, None, None, 0) for each in draw(others)],
        scored=wire.pack_ids(np.asarray(scored, np.int32)) if scored else b"",
        logprobs=columns if scored else None,
        prompt_logprobs=[wire.PromptLogprobs(number(*each), 3, empty) for each in draw(others)],
        vectors=[wire.Vector(number(*each), b"1234") for each in draw(others)],
    )


def by_request(output: wire.StepOutput) -> dict[int, list[object]]:
    """Everything that a step says, request by request."""
    said: dict[int, list[object]] = {}
    tokens = wire.unpack_ids(output.token_ids).tolist()
    counts = output.counts or [1] * len(output.ids)
    owners = [each for each, count in zip(output.ids, counts, strict=True) for _ in range(count)]
    rows: list[object] = [None] * len(tokens)
    if output.logprobs is not None:
        scored = wire.unpack_ids(output.scored).tolist()
        for at, row in zip(scored, rows_of(output.logprobs, [tokens[at] for at in scored]), strict=True):
            rows[at] = row
    for owner, token, row in zip(owners, tokens, rows, strict=True):
        said.setdefault(owner, []).append((token, row))
    for each in (*output.finished, *output.prompt_logprobs, *output.vectors):
        said.setdefault(each.id, []).append(each)
    return said


@given(outputs())
def test_the_parts_say_together_what_the_step_says_and_each_its_own(output: wire.StepOutput) -> None:
    parts = parted(output)
    assert len({client for client, _ in parts}) == len(parts)
    together: dict[int, list[object]] = {}
    for client, part in parts:
        said = by_request(part)
        assert {wire.client_of(each) for each in said} <= {client}
        together |= said
        assert wire.decode_engine(wire.encode(part)) == part
    assert together == by_request(output)


def test_messages_about_one_thing_go_to_whom_it_belongs_and_all_else_to_the_front() -> None:
    assert recipient(wire.Failed(number(2, 7), "queue_full", "")) == 2
    assert recipient(wire.Pong(number(0, 7))) == 0
    assert recipient(wire.Flushed(number(1, 7), ok=True)) == 1
    assert recipient(wire.Fatal("", 70, "engine_died")) == 0


def a_pair() -> tuple[Link, Link]:
    one, other = socket.socketpair()
    return Link(one), Link(other)


def join(front: Link, client: int) -> Link:
    ours, theirs = socket.socketpair()
    front.send(wire.encode(wire.Join(client)), theirs.detach())
    return Link(ours)


def test_another_client_joins_is_heard_and_leaves() -> None:
    front, ours = a_pair()
    clients = Clients(ours)
    wake = Wake(lambda: clients.links)
    other = join(front, 1)
    assert list(clients.receive()) == []
    assert len(clients.links) == 2
    other.send(wire.encode(wire.Abort(number(1, 5))))
    wake.wait()
    assert list(clients.receive()) == [wire.Abort(number(1, 5))]
    clients.send(wire.StepOutput(ids=[number(1, 5), 3], token_ids=wire.pack_ids([8, 9])))
    assert wire.decode_engine(other.receive()[0]) == wire.StepOutput(ids=[number(1, 5)], token_ids=wire.pack_ids([8]))
    assert wire.decode_engine(front.receive()[0]) == wire.StepOutput(ids=[3], token_ids=wire.pack_ids([9]))
    other.close()
    wake.wait()
    assert list(clients.receive()) == [wire.Left(1)]
    assert len(clients.links) == 1
    clients.send(wire.Failed(number(1, 5), "internal_error", ""))  # nobody hears it, and nothing fails


def test_another_client_that_does_not_read_is_cut_off_and_keeps_nobody_waiting() -> None:
    front, ours = a_pair()
    clients = Clients(ours)
    other = join(front, 1)
    assert list(clients.receive()) == []
    output = wire.StepOutput(ids=[number(1, 1)], token_ids=bytes(4 * 100))
    for _ in range(2 * UNSENT_MESSAGES + 5000):
        clients.send(output)
    assert list(clients.receive()) == [wire.Left(1)]
    clients.send(wire.Pong(4))
    assert wire.decode_engine(front.receive()[0]) == wire.Pong(4)
    other.close()


@pytest.mark.parametrize("clients", [1, 3])
def test_each_fills_its_share_of_the_queue_before_it_waits_for_first_events(clients: int) -> None:
    """What several clients have in the queue none of them knows, so each reckons with as much from the others."""
    client = EngineClient(number=1, clients=clients)
    info = wire.EngineInfo(
        architecture="", model_type="", dtype="", device="", attention_backend="", vocab_size=9, context_len=64, max_model_len=64,
        page_size=1, max_total_tokens=64, max_req_input_len=64, max_running_requests=1, weights_bytes=0, kv_bytes=0,
        max_queued_requests=6, max_queued_tokens=1 << 20,
    )  # fmt: skip
    client._info = info

    class Deaf:
        def on_tokens(self, tokens: object) -> None: ...

        def on_failure(self, error: object) -> None: ...

    asked = [client.submit(Deaf(), wire.pack_ids([1, 2]), wire.Sampling(1)) for _ in range(7)]
    assert [each.may_be_refused for each in asked].index(True) == 6 // clients
    assert {wire.client_of(each.id) for each in asked} == {1}
