"""Log probabilities: of drawn tokens and of prompts, equal to transformers' own and, bit for bit, the same in every schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.model import logprobs
from banyan_runtime.step import PromptScores, TokenLogprobs
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import VOCAB, TinyModel, gate

Models = Callable[[str], TinyModel]
TOP = 7


def asked(lengths: list[int]) -> list[Request]:
    return [
        Request(
            np.random.default_rng(i).integers(0, VOCAB, length).tolist(), new_tokens=5, row=i, top_logprobs=TOP, score_prompt=True,
            temperature=0.8 * (i % 2), seed=i, repetition_penalty=1.5, presence_penalty=0.5, banned=(3, 4),
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip


def joined(request: Request) -> TokenLogprobs:
    """Scores of the tokens at positions 1, 2, … of prompt and output."""
    parts = request.prompt_logprobs + request.logprobs
    return TokenLogprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("values", "top_ids", "top_values")))


def assert_scores(found: TokenLogprobs, tokens: list[int], reference: torch.Tensor, tolerance: float = 1e-4) -> None:
    """reference: log probabilities [len(tokens), vocabulary] before each position's next token."""
    expected = reference[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    np.testing.assert_allclose(found.values, expected, atol=tolerance)
    best = reference[:-1].topk(TOP)
    np.testing.assert_allclose(found.top_values, best.values, atol=tolerance)
    # Nearly equal tokens may swap places; whatever is named must be as likely as it says.
    np.testing.assert_allclose(reference[:-1].gather(1, torch.from_numpy(found.top_ids).long()), found.top_values, atol=tolerance)
    assert (np.diff(found.top_values) <= 0).all()


@pytest.mark.parametrize("family", gate(["llama", "mistral-window", "qwen2", "qwen3"]))
def test_scores_of_prompts_and_drawn_tokens_equal_transformers_in_single_and_double_precision(tiny_model: Models, family: str) -> None:
    model = tiny_model(family)
    requests = asked([9, 1, 40, 150, 2])
    Driver(model.load(), rows=5, context=256).run(requests, chunk=64)
    double = copy.deepcopy(model.reference).double()
    for request in requests:
        with torch.inference_mode():
            ids = torch.tensor([request.tokens])
            assert_scores(joined(request), request.tokens, torch.log_softmax(model.reference(ids).logits[0].float(), -1))
            assert_scores(joined(request), request.tokens, torch.log_softmax(double(ids).logits[0], -1))


@pytest.mark.long
@pytest.mark.real_model
def test_scores_of_smollm2_equal_transformers(smollm2: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 12 + "Photosynthesis is the process by which")
    request = Request(prompt, new_tokens=12, row=0, top_logprobs=TOP, score_prompt=True)
    Driver(TinyModel(smollm2, reference).load(), rows=1, context=256).run([request], chunk=100)
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([request.tokens])).logits[0], -1)
    assert_scores(joined(request), request.tokens, expected)
    assert joined(request).values[-4:].min() > -3, "a greedy text is likely"


def test_scores_are_bit_equal_alone_in_a_crowd_and_in_chunks(tiny_model: Models) -> None:
    runner, lengths = tiny_model("llama-576").load(runner="native"), [1, 3, 40, 129, 300, 64, 7]
    alone, together, chunked = asked(lengths), asked(lengths), asked(lengths)
    for request in alone:
        Driver(runner, rows=len(lengths), context=512).run([request])
    Driver(runner, rows=len(lengths), context=512).run(together)
    for request in chunked:
        request.start = request.row
    Driver(runner, rows=len(lengths), context=512, shuffle=3).run(chunked, chunk=29)
    for one, two, three in zip(alone, together, chunked, strict=True):
        assert one.output == two.output == three.output
        for name in ("values", "top_ids", "top_values"):
            expected = getattr(joined(one), name)
            assert np.array_equal(getattr(joined(two), name), expected)
            assert np.array_equal(getattr(joined(three), name), expected)


@given(levels=st.integers(1, 6), count=st.integers(0, 12), width=st.integers(1, 60), seed=st.integers(0, 1000))
def test_the_likeliest_come_first_and_equal_ones_by_id(levels: int, count: int, width: int, seed: int) -> None:
    scores = torch.from_numpy(np.random.default_rng(seed).integers(-levels, levels, (4, width)).astype(np.float32) / 4)
    scores[scores == 0] = -0.0 if seed % 2 else 0.0
    with mock.patch.object(logprobs, "_CELLS", width * (seed % 4 + 1)):  # that are sorted together
        raw = logprobs.raw(scores, count)
    expected = [np.lexsort((np.arange(width), -row))[:count].tolist() for row in scores.numpy()]
    assert raw.top_ids.tolist() == expected
    torch.testing.assert_close(raw.top_values, torch.log_softmax(scores, 1).gather(1, raw.top_ids))


def test_tokens_of_equal_probability_come_by_id_though_their_logits_differ() -> None:
    logits = torch.full((1, 60_000), 2.0)
    logits[0, 7] += 2.4e-7
    logits[0, 900] += 4.8e-7
    raw = logprobs.raw(logits, 2)
    assert raw.top_values[0, 0] == raw.top_values[0, 1]
    assert raw.top_ids.tolist() == [[7, 900]]


def test_an_impossible_token_has_a_finite_score() -> None:
    logits = torch.tensor([[0.0, -3e38, float("-inf"), float("nan")], [3e38, -3e38, 0.0, 1.0]])
    scores = logprobs.raw(logits, 4).of(torch.tensor([1, 1])).numpy()
    assert np.isfinite(scores.values).all()
    assert np.isfinite(scores.top_values).all()


def test_the_likeliest_of_many_rows_are_found_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of all of them at once would take several times what the logits do."""
    seen, keys = list[int](), logprobs._keys
    monkeypatch.setattr(logprobs, "_CELLS", 3 * 40)
    monkeypatch.setattr(logprobs, "_keys", lambda scores: (seen.append(len(scores)), keys(scores))[1])
    ids, values = logprobs.likeliest(torch.zeros(10, 40), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 10
    assert values.shape == (10, 5)
    assert seen == [3, 3, 3, 1]


@pytest.mark.parametrize("count", [0, 1, 16, 33, 100])
def test_a_long_prompt_is_scored_in_slices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(logprobs, "_CELLS", 1)
    hidden, head, seen = torch.randn(120, 8), torch.randn(8, 50), list[int]()

    def logits(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return part @ head

    at, targets = np.arange(5, 5 + count, dtype=np.int32), np.arange(count, dtype=np.int32) % 50
    scores = logprobs.of_prompt(hidden, logits, 50, PromptScores(at, targets, np.full(count, 3, np.int32))).numpy()
    expected = torch.log_softmax(hidden[5 : 5 + count] @ head, -1)
    np.testing.assert_allclose(scores.values, expected[np.arange(count), targets], atol=1e-5)
    np.testing.assert_allclose(scores.top_values, expected.topk(scores.top_ids.shape[1]).values, atol=1e-5)
    assert scores.top_ids.shape == (count, 3 if count else 0)
    assert max(seen) <= 16
