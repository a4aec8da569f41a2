"""Plans of /generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from banyan_runtime.front.errors import invalid, unsupported
from banyan_runtime.front.native.schema import UNSUPPORTED, NativeGenerateRequest, NativeSampling
from banyan_runtime.front.parsing import check_top_logprobs, parse, refuse_unsupported, shown, unknown
from banyan_runtime.front.plan import GenerateRequest, NativePlan
from banyan_runtime.front.prepare.encode import encode
from banyan_runtime.front.prepare.prompts import MAX_PROMPTS, as_ids, check_ids
from banyan_runtime.front.prepare.sequences import (
    Frame,
    Scores,
    Served,
    check_id,
    check_logprobs,
    check_room,
    check_sequences,
    priority_of,
    sequences,
)
from banyan_runtime.front.sampling import SamplingParams, resolve

DEFAULT_MAX_TOKENS: Final = 128
MAX_NAMED: Final = 128  # token_ids_logprob of a prompt: neighbours in a step carry as many cells
MAX_STOP_CONDITIONS: Final = 65_536  # characters and token ids, of all prompts together
T = TypeVar("T")


def plan_generate(served: Served, body: Mapping[str, Any], request_id: str) -> NativePlan:
    """Raises ApiError."""
    asked = parse(NativeGenerateRequest, body)
    refuse_unsupported(asked, UNSUPPORTED)
    prompts, listed = _prompts(asked)
    samplings = _each(asked.sampling_params, len(prompts), "sampling_params")
    all_params = _params(served, samplings)
    rids = _rids(asked, len(prompts))
    scores = _scores(served, asked, len(prompts))
    choices = all_params[0].n
    check_sequences(len(prompts), choices)
    frame = Frame(param="prompt", default_max_tokens=DEFAULT_MAX_TOKENS, stream=asked.stream, priority=priority_of(asked.priority))
    requests: list[GenerateRequest] = []
    constraints = [served.constraints.of(sampling) for sampling in samplings]
    for position, (prompt, params, own) in enumerate(zip(prompts, all_params, rids, strict=True)):
        ids = _ids(served, prompt)
        if (start := scores[position].prompt_from) > len(ids):
            raise invalid("logprob_start_len", f"logprob_start_len must be at most {len(ids)}, the prompt's length, got {shown(start)}.")
        seed_id = own or (request_id if len(prompts) == 1 else f"{request_id}_{position}")
        interval = samplings[position].stream_interval or 0
        # SGLang tells the token at logprob_start_len without a probability, and scores those behind it.
        asked_scores = dataclasses.replace(scores[position], prompt_from=start + 1 if start >= 0 else -1)
        bound = dataclasses.replace(frame, constraint=constraints[position])
        requests += sequences(served, bound, ids, params, seed_id=seed_id, scores=asked_scores, interval=interval)
    check_room(served.info, requests, "n" if choices > 1 else "input_ids" if asked.text is None else "text")
    check_logprobs(requests, "top_logprobs_num", all_params[0].max_tokens_name)
    return NativePlan(
        requests=tuple(requests),
        rids=tuple(rid for rid in rids for _ in range(choices)),
        listed=listed or len(requests) > 1,
        stream=asked.stream,
        top_logprobs=tuple(score.top for score in scores for _ in range(choices)),
        named=tuple(len(score.named) for score in scores for _ in range(choices)),
        logprobs_from=tuple(score.prompt_from for score in scores for _ in range(choices)),
        text_in_logprobs=asked.return_text_in_logprobs,
        group_rid=asked.rid if isinstance(asked.rid, str) and len(prompts) > 1 else None,
        ignored=unknown(asked, frozenset(UNSUPPORTED)),
    )


def _ids(served: Served, prompt: str | list[int]) -> list[int]:
    ids = encode(served, prompt, "prompt", add_special_tokens=True) if isinstance(prompt, str) else prompt
    if not ids:
        name = "text" if isinstance(prompt, str) else "input_ids"
        raise invalid(name, f"{name} cannot be empty: it makes no tokens.", "empty_array")
    check_ids(ids, served.info, "input_ids")
    return ids


def _prompts(asked: NativeGenerateRequest) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, and whether they came as a list. Raises ApiError."""
    if asked.text is None and asked.input_ids is None:
        raise invalid("text", "Either text, input_ids or input_embeds should be provided.", "missing_required_parameter")
    if asked.text is not None and asked.input_ids is not None:
        raise invalid("input_ids", "text and input_ids exclude each other.")
    given: str | list[Any] = asked.text if asked.text is not None else asked.input_ids or []
    if isinstance(given, str):
        if not given:
            raise invalid("text", "text cannot be empty.", "empty_string")
        return [given], False
    name = "text" if asked.text is not None else "input_ids"
    if not given:
        raise invalid(name, f"{name} cannot be empty.", "empty_array")
    if len(given) > MAX_PROMPTS and isinstance(given[0], str | list):
        raise invalid(name, f"at most {MAX_PROMPTS} prompts are allowed, got {len(given)}", "array_above_max_length")
    if asked.text is not None:
        return given, True
    if isinstance(given[0], list):
        return [as_ids(item, f"input_ids[{position}]") for position, item in enumerate(given)], True
    return [as_ids(given, "input_ids")], False


def _params(served: Served, samplings: Sequence[NativeSampling]) -> list[SamplingParams]:
    text = served.text
    if text.tokenizer is None and any(sampling.stop for sampling in samplings):
        raise unsupported("stop", "stop strings need a tokenizer")
    eos_ids, vocab_size = text.defaults.eos_ids, served.info.vocab_size
    for sampling in samplings:
        sampling.check()
    params = [resolve(sampling, text.defaults.native, eos_ids, vocab_size) for sampling in samplings]
    if len({each.n for each in params}) > 1:
        raise invalid("sampling_params", "n must be the same for all items.")
    if len(params) > 1 and sum(len(each.stop_token_ids) + sum(map(len, each.stops)) for each in params) > MAX_STOP_CONDITIONS:
        message = f"the stop strings and stop_token_ids of all items together can have at most {MAX_STOP_CONDITIONS} characters and ids."
        raise invalid("sampling_params", message, "array_above_max_length")
    return params


def _scores(served: Served, asked: NativeGenerateRequest, prompts: int) -> list[Scores]:
    """`prompt_from` is the first position that the answer tells of, which has no probability there."""
    wanted = _each(asked.return_logprob, prompts, "return_logprob")
    starts = _each(asked.logprob_start_len, prompts, "logprob_start_len")
    tops = _each(asked.top_logprobs_num, prompts, "top_logprobs_num")
    for start in starts:
        if start < -1:
            raise invalid("logprob_start_len", f"logprob_start_len must be at least -1, got {shown(start)}.", "integer_below_min_value")
    for top in tops:
        check_top_logprobs("top_logprobs_num", top)
    named = _named(served, asked, prompts)
    return [Scores(top, start, ids) if want else Scores() for want, start, top, ids in zip(wanted, starts, tops, named, strict=True)]


def _named(served: Served, asked: NativeGenerateRequest, prompts: int) -> list[tuple[int, ...]]:
    """token_ids_logprob of each prompt. Raises ApiError."""
    given: list[Any] = asked.token_ids_logprob or []
    each: list[Any] = [given] * prompts if all(type(item) is int for item in given) else [item or [] for item in given]
    lists = [as_ids(item, "token_ids_logprob") for item in _each(each, prompts, "token_ids_logprob")]
    for ids in lists:
        if len(ids) > MAX_NAMED:
            message = f"token_ids_logprob can have at most {MAX_NAMED} token ids, got {len(ids)}"
            raise invalid("token_ids_logprob", message, "array_above_max_length")
        check_ids(ids, served.info, "token_ids_logprob")
    return list(map(tuple, lists))


def _rids(asked: NativeGenerateRequest, prompts: int) -> list[str | None]:
    if asked.rid is None:
        return [None] * prompts
    if isinstance(asked.rid, str):
        rids = [asked.rid] if prompts == 1 else [f"{asked.rid}_{index}" for index in range(prompts)]
    else:
        rids = asked.rid
    if len(rids) != prompts:
        raise invalid("rid", f"rid has {len(rids)} items for {prompts} prompts.")
    if len(set(rids)) != len(rids):
        raise invalid("rid", "rid must not contain the same id twice.")
    for rid in rids:
        check_id(rid, "rid")
    return list(rids)


def _each(given: T | list[T], prompts: int, name: str) -> list[T]:
    """One for each prompt."""
    if not isinstance(given, list):
        return [given] * prompts
    if len(given) != prompts:
        raise invalid(name, f"{name} has {len(given)} items for {prompts} prompts.")
    return given
