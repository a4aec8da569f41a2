"""POST|PUT /generate: SGLang's own generation call, with cumulative streams and lists in, lists out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.chat.messages import FIRST_PROBLEM
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError, internal, invalid, unsupported
from banyan_runtime.front.generation import Delta, Finished, GenerateRequest, Generation, GenerationGroup, log
from banyan_runtime.front.limits import MAX_PROMPTS, admit, as_ids, check_ids, fit, read_json
from banyan_runtime.front.openai.serving import DONE, check_id, to_json
from banyan_runtime.front.parsing import Int, Ints, Number, RequestModel, Texts, parse, refuse_unsupported
from banyan_runtime.front.sampling import SamplingFields, SamplingParams, resolve
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.transport import EventStream, while_connected

DEFAULT_MAX_TOKENS: Final = 128
_OFF: Final[tuple[Any, ...]] = (False, 0, "", [], {})
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "input_embeds": _OFF,
    "image_data": _OFF,
    "audio_data": _OFF,
    "video_data": _OFF,
    "return_logprob": _OFF,
    "token_ids_logprob": _OFF,
    "lora_path": _OFF,
    "session_params": _OFF,
    "return_hidden_states": _OFF,
    "custom_logit_processor": _OFF,
}
_UNSUPPORTED_SAMPLING: Final[Mapping[str, tuple[Any, ...]]] = {
    "stop_regex": _OFF,
    "json_schema": _OFF,
    "regex": _OFF,
    "ebnf": _OFF,
    "structural_tag": _OFF,
    "logit_bias": _OFF,
    "custom_params": _OFF,
}
_IGNORED_SAMPLING: Final = frozenset({"spaces_between_special_tokens"})
_NAMES: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class NativeSampling(RequestModel):
    max_new_tokens: Int | None = None
    min_new_tokens: Int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ints | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    n: Int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool = False
    stream_interval: Int | None = None
    sampling_seed: Int | None = None

    def fields(self) -> SamplingFields:
        """Raises ApiError for keys that are unknown here or not served: a typing error must not change the sampling."""
        refuse_unsupported(self, _UNSUPPORTED_SAMPLING)
        for name, value in (self.model_extra or {}).items():
            if name not in _UNSUPPORTED_SAMPLING and name not in _IGNORED_SAMPLING and value is not None:
                raise invalid("sampling_params", f"Unknown sampling parameter '{name[:64]}'.", "unknown_parameter")
        return SamplingFields(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            seed=self.sampling_seed,
            n=self.n,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop=self.no_stop_trim,
            names=_NAMES,
            max_temperature=None,
            min_max_tokens=0,
        )


class NativeGenerateRequest(RequestModel):
    text: str | Texts | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], FIRST_PROBLEM] = NativeSampling()
    rid: str | Texts | None = None
    stream: bool = False
    priority: Int | None = None


async def generate(context: Context, request: Request) -> Response:
    received = time.monotonic()
    asked = parse(NativeGenerateRequest, await read_json(request))
    admit(context)
    assert context.text is not None
    text = context.text
    refuse_unsupported(asked, _UNSUPPORTED)
    prompts, listed = _prompts(asked)
    all_params = _params_list(context, text, asked, len(prompts))
    rids = _rids(context, asked, len(prompts))
    requests: list[GenerateRequest] = []
    for prompt, params, rid in zip(prompts, all_params, rids, strict=True):
        ids = await text.tokenize(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid("input_ids", "input_ids cannot be empty.", "empty_array")
        check_ids(ids, context.client.info, "input_ids")
        ids, max_new = fit(ids, params.max_tokens, DEFAULT_MAX_TOKENS, context.config, context.client.info, "prompt")
        for sample in range(params.n):
            tokenizer = text.tokenizer
            requests.append(
                GenerateRequest(
                    token_ids=ids,
                    sampling=params.sampling(max_new, rid, context.config.random_seed, sample),
                    detokenizer=None if tokenizer is None else tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens),
                    stops=params.stops,
                    include_stop=params.include_stop,
                    group=context.config.stream_interval if asked.stream else 0,
                    priority=max(-(2**31), min(2**31 - 1, asked.priority or 0)),
                    endpoint="other",
                    streaming=asked.stream,
                    param="prompt",
                    request_id=rid,
                    received=received,
                )
            )
    listed = listed or len(requests) > 1
    group = GenerationGroup(context, requests)
    answers = [_Answer(generation) for generation in group.generations]
    if asked.stream:
        try:
            await while_connected(request, group.admitted())
        except BaseException:
            group.close()
            raise
        return EventStream(_events(group, answers, listed))
    async with group:
        await while_connected(request, _collect(group, answers))
    bodies = [answer.body() for answer in answers]
    return Response(to_json(bodies if listed else bodies[0]), media_type="application/json")


class _Answer:
    """One sequence as it grows: text and ids are cumulative here, in a stream too."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._text: list[str] = []
        self._ids: list[int] = []
        self._finished: Finished | None = None

    def add(self, delta: Delta) -> None:
        self._text.append(delta.content)
        self._ids += delta.token_ids
        self._finished = delta.finished

    def body(self) -> dict[str, Any]:
        request, end = self._generation.request, self._finished
        meta: dict[str, Any] = {
            "id": request.request_id,
            "finish_reason": None if end is None else _finish_reason(end, self._generation.completion_tokens),
            "prompt_tokens": self._generation.prompt_tokens,
            "completion_tokens": len(self._ids),
            "cached_tokens": 0 if end is None else end.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": "default",
            "num_retractions": 0 if end is None else end.retractions,
        }
        if end is not None:
            meta["e2e_latency"] = time.monotonic() - request.received
        return {"text": "".join(self._text), "output_ids": self._ids, "meta_info": meta}


def _finish_reason(end: Finished, length: int) -> dict[str, Any]:
    if end.reason == "stop":
        return {"type": "stop", "matched": end.matched}
    if end.reason == "length":
        return {"type": "length", "length": length}
    return {"type": "abort", "message": "Aborted", "status_code": 499, "err_type": None}


async def _collect(group: GenerationGroup, answers: list[_Answer]) -> None:
    async for index, deltas in group:
        for delta in deltas:
            answers[index].add(delta)


async def _events(group: GenerationGroup, answers: list[_Answer], listed: bool) -> AsyncGenerator[bytes, None]:
    async with group:
        try:
            async for index, deltas in group:
                events: list[bytes] = []
                for delta in deltas:
                    answers[index].add(delta)
                    body = answers[index].body()
                    events.append(b"data: " + to_json({**body, "index": index} if listed else body) + b"\n\n")
                yield b"".join(events)
        except ApiError as error:
            yield b"data: " + to_json(_in_stream(error)) + b"\n\n"
        except Exception:
            log.exception("a stream failed")
            yield b"data: " + to_json(_in_stream(internal())) + b"\n\n"
        yield DONE


def _in_stream(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
            "retryable": error.status >= 500,
        }
    }


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
    if not given:
        name = "text" if asked.text is not None else "input_ids"
        raise invalid(name, f"{name} cannot be empty.", "empty_array")
    if len(given) > MAX_PROMPTS and isinstance(given[0], str | list):
        raise invalid("text", f"at most {MAX_PROMPTS} prompts are allowed, got {len(given)}", "array_above_max_length")
    if asked.text is not None:
        return given, True
    if isinstance(given[0], list):
        return [as_ids(item, f"input_ids[{position}]") for position, item in enumerate(given)], True
    return [as_ids(given, "input_ids")], False


def _params_list(context: Context, text: Text, asked: NativeGenerateRequest, prompts: int) -> list[SamplingParams]:
    given = asked.sampling_params if isinstance(asked.sampling_params, list) else [asked.sampling_params] * prompts
    if len(given) != prompts:
        raise invalid("sampling_params", f"sampling_params has {len(given)} items for {prompts} prompts.")
    if text.tokenizer is None and any(params.stop for params in given):
        raise unsupported("stop", "stop strings need a tokenizer")
    eos_ids, vocab_size = text.defaults.eos_ids, context.client.info.vocab_size
    params = [resolve(params.fields(), text.defaults.native, eos_ids, vocab_size) for params in given]
    if len({params.n for params in params}) > 1:
        raise invalid("sampling_params", "n must be the same for all items.")
    return params


def _rids(context: Context, asked: NativeGenerateRequest, prompts: int) -> list[str]:
    if asked.rid is None:
        return [uuid.uuid4().hex for _ in range(prompts)]
    if isinstance(asked.rid, str):
        rids = [asked.rid] if prompts == 1 else [f"{asked.rid}_{index}" for index in range(prompts)]
    else:
        rids = asked.rid
    if len(rids) != prompts:
        raise invalid("rid", f"rid has {len(rids)} items for {prompts} prompts.")
    if len(set(rids)) != len(rids):
        raise invalid("rid", "rid must not contain the same id twice.")
    for rid in rids:
        check_id(context, rid, "rid")
    return rids
