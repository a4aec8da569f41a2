"""Plans of embeddings, and what all requests for vectors have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from banyan_runtime import wire
from banyan_runtime.front.chat.messages import ChatMessage
from banyan_runtime.front.chat.prompt import ChatOptions, render
from banyan_runtime.front.errors import ApiError, invalid, invalid_type, unknown_model
from banyan_runtime.front.openai.vector_schema import EmbeddingRequest, VectorRequest
from banyan_runtime.front.parsing import parse, shown
from banyan_runtime.front.plan import EmbeddingPlan, Envelope, GenerateRequest
from banyan_runtime.front.prepare.encode import beginning, encode, ending
from banyan_runtime.front.prepare.prompts import as_ids, check_ids, fit
from banyan_runtime.front.prepare.sequences import Served, check_id, check_room, priority_of
from banyan_runtime.front.text.embedding import Embedding
from banyan_runtime.front.text.tokenizer import Tokenizer

MAX_INPUTS: Final = 2048  # of one request, OpenAI's limit
NOTHING: Final = "Input cannot be empty or whitespace only"
Value = str | list[int]


@dataclass(frozen=True, slots=True)
class Input:
    """One text or list of token ids, neither of them empty, and where in the request it stands."""

    param: str
    value: Value
    special: bool = True  # special tokens are added unless the request says otherwise


def plan_embeddings(served: Served, body: Mapping[str, Any], request_id: str) -> EmbeddingPlan:
    """Raises ApiError."""
    embedding = needed(served)
    asked = parse(EmbeddingRequest, body)
    envelope = begin(served, asked)
    if asked.dimensions is not None:
        embedding.check(asked.dimensions)
    given = [_conversation(served, asked, asked.messages)] if asked.messages is not None else inputs(asked.input or [], "input")
    requests = [pooled(served, embedding, asked, each) for each in given]
    check_room(served.info, requests, "input")
    return EmbeddingPlan(
        envelope=envelope,
        requests=tuple(requests),
        dimensions=asked.dimensions or 0,
        base64=asked.encoding_format == "base64",
    )


def needed(served: Served) -> Embedding:
    """Raises ApiError where no vectors are served."""
    if served.text.embedding is None:
        message = (
            "This model does not appear to be an embedding model by default. Start its server with --is-embedding, or with "
            "--enable-embeddings to serve vectors beside text."
        )
        raise ApiError(400, message, code="unsupported")
    return served.text.embedding


def begin(served: Served, asked: VectorRequest) -> Envelope:
    """Raises ApiError."""
    config = served.config
    if asked.model is not None and not config.serves(asked.model):
        raise unknown_model(asked.model, config.names)
    asked.check()
    own_id, param = asked.rid or asked.request_id, "rid" if asked.rid else "request_id"
    if own_id is not None:
        check_id(own_id, param)
    ignored = asked.without_effect()
    return Envelope(model=asked.model or config.names[0], own_id=own_id or None, own_id_param=param, ignored=ignored)


def inputs(given: str | list[Any], param: str) -> list[Input]:
    """One or many inputs. Raises ApiError."""
    if isinstance(given, str):
        return [_filled(param, given)]
    if not given:
        raise invalid(param, NOTHING, "empty_array")
    if all(type(item) is int for item in given):
        return [Input(param, given)]
    check_number(len(given), param)
    if not all(isinstance(item, str) for item in given) and not all(isinstance(item, list) for item in given):
        raise invalid_type(param, "expected a string, an array of strings, an array of token ids, or an array of such arrays.")
    places = [f"{param}[{position}]" for position in range(len(given))]
    return [_filled(at, item if isinstance(item, str) else as_ids(item, at)) for at, item in zip(places, given, strict=True)]


def check_number(number: int, param: str) -> None:
    """Raises ApiError for more inputs than one request may have."""
    if number > MAX_INPUTS:
        raise invalid(param, f"at most {MAX_INPUTS} inputs are allowed, got {number}", "array_above_max_length")


def ids_of(served: Served, asked: VectorRequest, given: Input, room: int = 0) -> list[int]:
    """The token ids of one input, behind which `room` more must fit. Raises ApiError."""
    ids, param = given.value, given.param
    special = given.special if asked.add_special_tokens is None else asked.add_special_tokens
    if not isinstance(ids, str):
        check_ids(ids, served.info, param)  # also those that are cut away
    if asked.truncate_prompt_tokens:
        ids = _cut(served, asked, ids, special)
    elif isinstance(ids, str):
        ids = encode(served, ids, param, add_special_tokens=special)
    if not ids:
        raise invalid(param, f"Input cannot be empty: '{param}' makes no tokens.", "empty_array")
    check_ids(ids, served.info, param)
    fit(len(ids), room, None, served.info, param)
    return ids


def pooled(served: Served, embedding: Embedding, asked: VectorRequest, given: Input) -> GenerateRequest:
    """The sequence of which a vector is wanted. Raises ApiError."""
    return GenerateRequest(
        token_ids=wire.pack_ids(ids_of(served, asked, given)),
        sampling=wire.Sampling(0),
        priority=priority_of(asked.priority),
        param=given.param,
        pooling=embedding.pooling,
    )


def _conversation(served: Served, asked: EmbeddingRequest, messages: Sequence[ChatMessage]) -> Input:
    """The text of a chat, which has its special tokens. Raises ApiError."""
    options = ChatOptions(
        add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
        continue_final_message=asked.continue_final_message,
        variables=asked.chat_template_kwargs,
    )
    return Input("messages", render(served.text.template, messages, options).text, special=False)


def _cut(served: Served, asked: VectorRequest, value: Value, special: bool) -> list[int]:
    """The token ids of what `truncate_prompt_tokens` keeps: of a text, with the special tokens around it. Raises ApiError."""
    longest = min(served.info.max_req_input_len, served.info.max_model_len - 1)
    kept = longest if asked.truncate_prompt_tokens == -1 else asked.truncate_prompt_tokens
    if kept > longest:
        message = f"truncate_prompt_tokens must be at most {longest}, which is what fits, got {shown(kept)}."
        raise invalid("truncate_prompt_tokens", message, "integer_above_max_value")
    left = asked.truncation_side == "left"
    if not isinstance(value, str):
        return value[max(0, len(value) - kept) :] if left else value[:kept]
    tokenizer = served.text.needed_tokenizer
    before, behind = _around(tokenizer) if special else ([], [])
    room = kept - len(before) - len(behind)
    if room < 1:
        least = kept - room + 1
        message = f"truncate_prompt_tokens must be at least {least}, a token and the special ones around it, got {kept}."
        raise invalid("truncate_prompt_tokens", message, "integer_below_min_value")
    if left:
        return [*before, *ending(tokenizer, value, room), *behind]
    ids, _ = beginning(tokenizer, value, room, add_special_tokens=False)
    return [*before, *ids[:room], *behind]


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens before and behind every text."""
    text, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    begin = next((at for at in range(len(whole) - len(text) + 1) if whole[at : at + len(text)] == text), 0)
    return whole[:begin], whole[begin + len(text) :]


def _filled(param: str, given: Value) -> Input:
    if not (given.strip() if isinstance(given, str) else given):
        raise invalid(param, NOTHING, "empty_string" if isinstance(given, str) else "empty_array")
    return Input(param, given)
