"""Prompts and the next token of those who run in one step: it reads the weights once for both. Pure functions of steps and results."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from banyan_runtime.step import I32, Ragged, RowUpdates, SamplingColumns, Step, StepResult, TokenBiases, TokenLogprobs, TokenMask

Number = TypeVar("Number", bound=np.generic)


def joined(prompts: Step, decode: Step) -> Step:
    """A step over the sequences of a prefill step, then those of a decode step that was built behind it, of one token each. If the
    latter gets its mask later, so does the whole."""
    first, second = len(prompts.rows), len(decode.rows)
    assert (prompts.mode, decode.mode) == ("prefill", "decode")
    assert len(decode.token_ids) == second, "no guesses"
    assert prompts.page_size == decode.page_size
    prompts_alone = decode.histories, decode.prompt_scores, decode.pooling, decode.embeddings
    assert all(part is None for part in (*prompts_alone, decode.adapters, prompts.adapters))

    def column(one: npt.NDArray[Number] | None, other: npt.NDArray[Number] | None, absent: int) -> npt.NDArray[Number] | None:
        if one is None and other is None:
            return None
        parts = [np.full(count, absent) if part is None else part for part, count in ((one, first), (other, second))]
        return np.concatenate(parts, dtype=(other if one is None else one).dtype)  # type: ignore[union-attr]

    return Step(
        mode="mixed",
        token_ids=np.concatenate([prompts.token_ids, decode.token_ids]),
        positions=np.concatenate([prompts.positions, decode.positions]),
        out_slots=np.concatenate([prompts.out_slots, decode.out_slots]),
        rows=np.concatenate([prompts.rows, decode.rows]),
        query_lens=np.concatenate([prompts.query_lens, decode.query_lens]),
        kv_lens=np.concatenate([prompts.kv_lens, decode.kv_lens]),
        samples=np.concatenate([prompts.samples, decode.samples]),
        sampling=_columns(prompts.sampling, decode.sampling),
        updates=_updates(prompts.updates, decode.updates),
        histories=prompts.histories,
        banned=_ragged(prompts.banned, first, decode.banned, second),
        bias=_biases(prompts.bias, first, decode.bias, second),
        mask=None if decode.mask_later else _masks(prompts.mask, first, decode.mask, second),
        mask_later=decode.mask_later,
        top_logprobs=column(prompts.top_logprobs, decode.top_logprobs, -1),
        prompt_scores=prompts.prompt_scores,
        named=_named(prompts.named, first, decode.named, second),
        pooling=column(prompts.pooling, None, 0),
        embeddings=prompts.embeddings,
        page_size=prompts.page_size,
    )


def parted(result: StepResult, prompts: Step, decode: Step) -> tuple[StepResult, StepResult]:
    """What `joined` steps gave, as each of them would have given it."""
    assert result.accepted is None, "no guesses"
    first, drawn = len(prompts.rows), int(prompts.samples.sum())
    scored = 0 if prompts.top_logprobs is None else int(prompts.samples[prompts.top_logprobs >= 0].sum())
    asked = None if prompts.prompt_scores is None else prompts.prompt_scores.top
    one = StepResult(
        token_ids=result.token_ids[:drawn],
        failed=result.failed[:first],
        logprobs=_scores(result.logprobs, slice(scored), prompts),
        prompt_logprobs=_narrowed(result.prompt_logprobs, _width(asked), prompts.named),
        vectors=result.vectors,
        replayed=result.replayed,
    )
    other = StepResult(
        token_ids=result.token_ids[drawn:],
        failed=result.failed[first:],
        logprobs=_scores(result.logprobs, slice(scored, None), decode),
        replayed=result.replayed,
    )
    return one, other


def _columns(one: SamplingColumns, other: SamplingColumns) -> SamplingColumns:
    def both(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(one, name), getattr(other, name)])

    return SamplingColumns(
        temperature=both("temperature"),
        top_k=both("top_k"),
        top_p=both("top_p"),
        min_p=both("min_p"),
        frequency_penalty=both("frequency_penalty"),
        presence_penalty=both("presence_penalty"),
        repetition_penalty=both("repetition_penalty"),
        seed=both("seed"),
    )


def _updates(one: RowUpdates | None, other: RowUpdates | None) -> RowUpdates | None:
    """Of `one`, then of `other`."""
    if one is None or other is None:
        return one or other
    slots = _ragged(one.slots, len(one.slots), other.slots, len(other.slots))
    assert slots is not None
    return RowUpdates(np.concatenate([one.rows, other.rows]), np.concatenate([one.starts, other.starts]), slots)


def _ragged(one: Ragged | None, first: int, other: Ragged | None, second: int) -> Ragged | None:
    if one is None and other is None:
        return None
    one, other = one or _empty(first), other or _empty(second)
    return Ragged(np.concatenate([one.values, other.values]), np.concatenate([one.offsets, one.offsets[-1] + other.offsets[1:]]))


def _empty(count: int) -> Ragged:
    return Ragged(np.zeros(0, np.int32), np.zeros(count + 1, np.int32))


def _biases(one: TokenBiases | None, first: int, other: TokenBiases | None, second: int) -> TokenBiases | None:
    ids = _ragged(None if one is None else one.ids, first, None if other is None else other.ids, second)
    if ids is None:
        return None
    return TokenBiases(ids, np.concatenate([part.values for part in (one, other) if part is not None]))


def _masks(one: TokenMask | None, first: int, other: TokenMask | None, second: int) -> TokenMask | None:
    if one is None and other is None:
        return None
    there = [part for part in (one, other) if part is not None]
    before = 0 if one is None else len(one.words)
    masks = [
        np.full(first, -1, np.int32) if one is None else one.masks,
        np.full(second, -1, np.int32) if other is None else np.where(other.masks < 0, other.masks, other.masks + np.int32(before)),
    ]
    return TokenMask(np.concatenate([part.words for part in there]), np.concatenate(masks))


def _named(one: I32 | None, first: int, other: I32 | None, second: int) -> I32 | None:
    """Who wants fewer has them in the last columns."""
    if one is None and other is None:
        return None
    parts = [np.zeros((count, 0), np.int32) if part is None else part for part, count in ((one, first), (other, second))]
    table = np.zeros((first + second, max(part.shape[1] for part in parts)), np.int32)
    for part, place in zip(parts, (slice(first), slice(first, None)), strict=True):
        table[place, table.shape[1] - part.shape[1] :] = part
    return table


def _scores(scores: TokenLogprobs | None, part: slice, step: Step) -> TokenLogprobs | None:
    if scores is None or step.top_logprobs is None:
        return None
    own = TokenLogprobs(scores.values[part], scores.top_ids[part], scores.top_values[part])
    return _narrowed(own, _width(step.top_logprobs), step.named)


def _narrowed(scores: TokenLogprobs | None, top: int, named: I32 | None) -> TokenLogprobs | None:
    """With only the `top` likeliest tokens, and the last columns, of those that a step has named."""
    if scores is None:
        return None
    width = scores.top_ids.shape[1]
    wanted = [*range(top), *range(width - (0 if named is None else named.shape[1]), width)]
    if len(wanted) == width:
        return scores
    return TokenLogprobs(scores.values, scores.top_ids[:, wanted], scores.top_values[:, wanted])


def _width(top: I32 | None) -> int:
    """How many tokens are given beside each."""
    return 0 if top is None else int(top.max(initial=0))
