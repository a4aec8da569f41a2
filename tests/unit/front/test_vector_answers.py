"""From a plan of vectors to the bytes of its answer, over real HTTP: the test makes the plan and plays the engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from banyan_runtime import wire
from banyan_runtime.front.event_stream import PART_BYTES
from banyan_runtime.front.plan import EmbeddingPlan, Envelope, GenerateRequest, RerankPlan
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.answering import Play, player
from tests.unit.front.support import Connection, FakeEngine, Front, finish


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    return player(tmp_path, bytes_tokenizer)


def requests(number: int) -> tuple[GenerateRequest, ...]:
    return tuple(GenerateRequest(token_ids=wire.pack_ids([number, 5]), sampling=wire.Sampling(0), pooling=2) for number in range(number))


def embedding(number: int) -> EmbeddingPlan:
    return EmbeddingPlan(envelope=Envelope(model="tiny"), requests=requests(number))


def vector(request_id: int, *values: float) -> wire.Vector:
    return wire.Vector(request_id, np.array(values, "<f4").tobytes())


async def whole(connection: Connection) -> bytes:
    """The body of an answer that is made while it is sent."""
    body = b""
    while piece := await connection.chunk():
        body += piece.encode()
    return body


def test_vectors_are_told_in_the_order_of_their_inputs_whatever_comes_first(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.preparer.plans.append(embedding(3))
        connection = await Connection.post(address, "/v1/embeddings")
        submits = await engine.submits(3)
        assert [submit.pooling for submit in submits] == [2, 2, 2]
        one, two, three = (submit.id for submit in submits)
        await engine.step({}, finish(three), vectors=[vector(three, 0, 3)])
        await engine.step({}, finish(one), finish(two), vectors=[vector(two, -2, 0), vector(one, 3, 4)])
        answer = await connection.json()
        found = [item["embedding"] for item in answer["data"]]
        np.testing.assert_allclose(found, [[0.6, 0.8], [-1, 0], [0, 1]], atol=1e-7)
        assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
        assert [(record.endpoint, record.finish_reason, record.completion_tokens) for record in front.records] == [
            ("embeddings", "stop", 0)
        ] * 3

    play(scenario)


def test_one_that_fails_fails_the_request_and_ends_the_others(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.preparer.plans.append(embedding(2))
        connection = await Connection.post(address, "/v1/embeddings")
        one, two = (submit.id for submit in await engine.submits(2))
        await engine.send(wire.Failed(one, "internal_error", "NaN"))
        assert await engine.aborted() == two
        status, _ = await connection.head()
        assert status == 500

    play(scenario)


def test_a_client_that_leaves_ends_what_it_asked_for(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.preparer.plans.append(embedding(2))
        connection = await Connection.post(address, "/v1/embeddings")
        ids = {submit.id for submit in await engine.submits(2)}
        connection.close()
        assert {await engine.aborted(), await engine.aborted()} == ids

    play(scenario)


def test_a_long_answer_is_made_while_it_is_sent(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.preparer.plans.append(embedding(20))
        connection = await Connection.post(address, "/v1/embeddings")
        ids = [submit.id for submit in await engine.submits(20)]
        values = np.random.default_rng(1).normal(size=(20, 1024))
        await engine.step({}, *map(finish, ids), vectors=[vector(*pair) for pair in zip(ids, *values.T, strict=True)])
        status, headers = await connection.head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        body = await whole(connection)
        assert len(body) > 2 * PART_BYTES
        assert [item["index"] for item in json.loads(body)["data"]] == list(range(20))

    play(scenario)


def test_documents_that_are_equally_similar_keep_their_order(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.preparer.plans.append(RerankPlan(envelope=Envelope(model="tiny"), requests=requests(5), top_n=3))
        connection = await Connection.post(address, "/rerank")
        ids = [submit.id for submit in await engine.submits(5)]
        values = [(1, 0), (0, 1), (0, 0), (2, 2), (0, -0.5)]  # of the second document nothing can be said
        await engine.step({}, *map(finish, ids), vectors=[vector(one, *pair) for one, pair in zip(ids, values, strict=True)])
        told = [(item["index"], item["relevance_score"]) for item in (await connection.json())["results"]]
        assert told == [(2, pytest.approx(0.5**0.5)), (0, 0.0), (1, 0.0)]

    play(scenario)
