"""Embeddings, score and rerank through a real server, with the real client where there is one; transformers is the reference."""

from __future__ import annotations

import base64
import concurrent.futures
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

from banyan_runtime.batch.lines import ENDPOINTS
from tests.support.server.process import MODEL, ServerProcess, StartServer

TEXTS = ["The capital of France is Paris.", "Cats sleep most of the day. " * 12, "ok"]
SIZE = 128
CLOSE = 1e-4


class Reference:
    """The vectors of transformers' own model."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def hidden(self, ids: list[int]) -> np.ndarray:
        with self._torch.inference_mode():
            found: np.ndarray = self._model.model(self._torch.tensor([ids])).last_hidden_state[0].numpy()
        return found

    def next_token(self, ids: list[int]) -> np.ndarray:
        """Log probabilities of what follows."""
        with self._torch.inference_mode():
            found: np.ndarray = self._model(self._torch.tensor([ids])).logits[0, -1].double().log_softmax(-1).numpy()
        return found


@pytest.fixture(scope="module")
def reference(tiny_chat: Path) -> Reference:
    return Reference(tiny_chat)


@pytest.fixture(scope="module")
def means(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """A server of its own: one of vectors alone refuses text."""
    storage = str(tmp_path_factory.mktemp("storage"))
    flags = ("--is-embedding", "--pooling-type", "mean", "--dtype", "float32", "--chunked-prefill-size", "16")
    return start_server(*flags, "--file-storage-path", storage).ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


def tokens(server: ServerProcess, text: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    return ids


def embed(server: ServerProcess, given: Any, **options: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"model": MODEL, "input": given, **options}).json()
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["embedding"] for item in answer["data"]]


def unit(vector: np.ndarray) -> np.ndarray:
    found: np.ndarray = vector / np.linalg.norm(vector)
    return found


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(unit(one) @ unit(other))


def test_the_sdk_reads_the_last_tokens_vector_from_base64_and_from_numbers(
    client: openai.OpenAI, server: ServerProcess, reference: Reference
) -> None:
    packed = client.embeddings.create(model=MODEL, input=TEXTS)  # the SDK asks for base64
    plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [item.embedding for item in packed.data] == [item.embedding for item in plain.data]
    assert [item.index for item in packed.data] == [0, 1, 2]
    assert {item.object for item in packed.data} == {"embedding"}
    assert (packed.object, packed.model) == ("list", MODEL)
    prompts = [tokens(server, text) for text in TEXTS]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, prompts))
    for ids, item in zip(prompts, plain.data, strict=True):
        np.testing.assert_allclose(item.embedding, unit(reference.hidden(ids)[-1]), atol=CLOSE)


def test_without_a_format_numbers_come_and_base64_is_little_endian(server: ServerProcess) -> None:
    (numbers,) = embed(server, "hello", user="somebody")
    (packed,) = embed(server, "hello", encoding_format="base64")
    assert isinstance(packed, str)
    assert np.frombuffer(base64.b64decode(packed, validate=True), "<f4").tolist() == numbers


def test_texts_and_token_ids_alone_and_in_lists_are_the_same_input(server: ServerProcess) -> None:
    (alone,) = embed(server, TEXTS[0])
    ids = tokens(server, TEXTS[0])
    assert embed(server, ids) == [alone]
    assert embed(server, [ids, tokens(server, TEXTS[2])])[0] == alone
    assert embed(server, [TEXTS[1], TEXTS[0]])[1] == alone


def test_a_vector_has_the_same_bits_whatever_else_runs(server: ServerProcess) -> None:
    alone = embed(server, TEXTS)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        text = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        busy = [pool.submit(httpx.post, f"{server.url}/generate", json=text, timeout=60) for _ in range(4)]
        crowd = list(pool.map(lambda _: embed(server, [*TEXTS, "another one"]), range(4)))
        assert {answer.result().status_code for answer in busy} == {200}
    assert all(found[:3] == alone for found in crowd)


def test_fewer_dimensions_are_the_first_ones_brought_to_length_1(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model=MODEL, input="hello").data[0].embedding
    cut = client.embeddings.create(model=MODEL, input="hello", dimensions=32).data[0].embedding
    np.testing.assert_allclose(cut, unit(np.array(whole[:32])), atol=1e-6)


@pytest.mark.matrix(gate=5)
@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": " \n"}, "input", "empty_string"),
        ({"input": ["a", ""]}, "input[1]", "empty_string"),
        ({"input": []}, "input", "empty_array"),
        ({"input": [[5], []]}, "input[1]", "empty_array"),
        ({"input": ["a", 5]}, "input", "invalid_type"),
        ({"input": [[5, "a"]]}, "input[0]", "invalid_type"),
        ({"input": [[5], [5_000_000]]}, "input[1]", "invalid_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "integer_below_min_value"),
        ({"input": "a", "dimensions": 129}, "dimensions", "integer_above_max_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": "word " * 9000}, "input", "context_length_exceeded"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "integer_below_min_value"),
        ({"input": "a", "normalize": False}, "normalize", "unsupported"),
        ({}, "input", "missing_required_parameter"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_a_request_is_said(server: ServerProcess, body: dict[str, Any], param: str, code: str) -> None:
    answer = server.post("/v1/embeddings", {"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_requests_for_vectors_are_counted(server: ServerProcess) -> None:
    series = 'banyan_requests_total{endpoint="embeddings",finish_reason="stop"}'
    before = server.settled(series)
    embed(server, ["one", "two"])
    assert server.eventually(lambda: server.metric(series) == before + 2, "both in the counter")


# --- score and rerank ---


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")])
def test_scores_are_cosines_of_one_with_each_or_of_pairs(
    server: ServerProcess, reference: Reference, path: str, names: tuple[str, str]
) -> None:
    vectors = [reference.hidden(tokens(server, text))[-1] for text in TEXTS]
    one, other = names
    answer = server.post(path, {"model": MODEL, one: TEXTS[0], other: TEXTS[1:]}).json()
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", MODEL, "score-")
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "score"), (1, "score")]
    assert answer["usage"]["prompt_tokens"] == sum(len(tokens(server, text)) for text in TEXTS)
    expected = [cosine(vectors[0], vectors[1]), cosine(vectors[0], vectors[2])]
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=CLOSE)
    pairs = server.post(path, {"model": MODEL, one: TEXTS[:2], other: TEXTS[1:]}).json()
    expected = [cosine(vectors[0], vectors[1]), cosine(vectors[1], vectors[2])]
    np.testing.assert_allclose([item["score"] for item in pairs["data"]], expected, atol=CLOSE)


def test_labels_get_the_probability_that_they_follow(server: ServerProcess, reference: Reference) -> None:
    labels, query, items = [5, 77, 300], "Is it true? ", ["Yes it", "No, not at all, it"]
    wanted = [reference.next_token(tokens(server, query + item))[labels] for item in items]
    body = {"model": MODEL, "query": query, "items": items, "label_token_ids": labels}
    answer = server.post("/v1/score", body).json()
    assert (answer["object"], answer["model"]) == ("scoring", MODEL)
    assert answer["usage"]["prompt_tokens"] == sum(len(tokens(server, query + item)) for item in items)
    np.testing.assert_allclose(answer["scores"], np.exp(wanted), rtol=1e-3)
    shares = [np.exp(row / 2) / np.exp(row / 2).sum() for row in wanted]
    softmax = server.post("/v1/score", {**body, "apply_softmax": True, "temperature": 2}).json()
    np.testing.assert_allclose(softmax["scores"], shares, rtol=1e-3)
    swapped = server.post("/v1/score", {**body, "items": items[0], "item_first": True}).json()
    np.testing.assert_allclose(swapped["scores"], [np.exp(reference.next_token(tokens(server, items[0] + query))[labels])], rtol=1e-3)
    ids = {**body, "query": tokens(server, query), "items": [[9, 8], [7]]}
    by_ids = server.post("/v1/score", ids).json()
    expected = [np.exp(reference.next_token([*tokens(server, query), *item])[labels]) for item in ([9, 8], [7])]
    np.testing.assert_allclose(by_ids["scores"], expected, rtol=1e-3)


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({}, "queries"),
        ({"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        ({"query": "a", "items": ["b"], "label_token_ids": [5_000_000]}, "label_token_ids"),
        ({"query": "a", "items": [[5]], "label_token_ids": [1]}, "items"),
        ({"query": "a", "label_token_ids": [1]}, "items"),
        ({"query": "a", "items": ["b"], "label_token_ids": [1], "temperature": 2}, "temperature"),
    ],
    ids=str,
)
def test_a_score_that_cannot_be_made_is_refused_by_field(server: ServerProcess, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/score", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_similarity(server: ServerProcess, path: str) -> None:
    documents = [TEXTS[1], TEXTS[0], TEXTS[2]]
    body = {"model": MODEL, "query": TEXTS[0], "documents": documents}
    answer = server.post(path, body).json()
    assert set(answer) == {"id", "model", "usage", "results"}
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["index"] == 1, "the query itself"
    assert scores[0] == pytest.approx(1)
    assert [item["document"]["text"] for item in answer["results"]] == [documents[item["index"]] for item in answer["results"]]
    told = server.post("/v1/score", {"model": MODEL, "text_1": TEXTS[0], "text_2": documents}).json()["data"]
    assert scores == [told[item["index"]]["score"] for item in answer["results"]]
    short = server.post(path, {**body, "documents": [{"text": text} for text in documents], "top_n": 2, "return_documents": False})
    assert short.json()["results"] == [{key: item[key] for key in ("index", "relevance_score")} for item in answer["results"][:2]]
    everything = server.post(path, {**body, "top_n": 0}).json()
    assert everything["results"] == answer["results"]
    asked = server.post(path, {**body, "instruction": "Find the same"}).json()["results"]
    query = "Instruct: Find the same\nQuery: " + TEXTS[0]
    told = server.post("/v1/score", {"model": MODEL, "text_1": query, "text_2": documents}).json()["data"]
    assert [item["relevance_score"] for item in asked] == [told[item["index"]]["score"] for item in asked]
    negative = server.post(path, {**body, "top_n": -1})
    assert (negative.status_code, negative.json()["error"]["param"]) == (400, "top_n")


# --- who serves what ---


@pytest.mark.long
def test_a_server_of_vectors_refuses_text(means: ServerProcess, reference: Reference) -> None:
    found = embed(means, TEXTS)
    for given, vector in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(vector, unit(reference.hidden(tokens(means, given)).mean(0)), atol=CLOSE)
    assert embed(means, TEXTS) == found, "now their tokens are in the prefix cache"
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"text": "a"}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
    ):
        answer = means.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported"), path
    assert means.get("/model_info").json()["is_generation"] is False
    cut = means.post("/v1/embeddings", {"input": "a", "dimensions": 32})
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "dimensions")
    assert means.post("/v1/embeddings", {"input": "a", "dimensions": SIZE}).status_code == 200
    for endpoint in set(ENDPOINTS) - {"/v1/embeddings"}:
        batch = means.post("/v1/batches", {"input_file_id": "file-1", "endpoint": endpoint, "completion_window": "24h"})
        assert batch.json()["error"]["param"] == "endpoint"


def test_a_batch_of_embeddings_gives_the_vectors_of_its_lines(client: openai.OpenAI, server: ServerProcess) -> None:
    body = [{"custom_id": str(at), "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": text}}
            for at, text in enumerate(TEXTS)]  # fmt: skip
    data = "".join(json.dumps(line) + "\n" for line in body).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    batch = server.eventually(
        lambda: seen if (seen := client.batches.retrieve(batch.id)).status in ("completed", "failed") else None, "the end of the batch", 60
    )
    assert batch.output_file_id is not None, batch
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    found = [answer["response"]["body"]["data"][0]["embedding"] for answer in answers]
    assert found == embed(server, TEXTS)
