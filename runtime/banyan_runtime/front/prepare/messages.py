"""Plans of Anthropic's messages: the chat completion that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from banyan_runtime.front.anthropic.schema import CountRequest, MessagesRequest
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.plan import AnswerPlan, ChatPlan
from banyan_runtime.front.prepare.chat import plan_chat
from banyan_runtime.front.prepare.sequences import Served
from banyan_runtime.front.renaming import renamed, renamed_plan


def plan_message(served: Served, body: Mapping[str, Any], request_id: str) -> ChatPlan:
    """Raises ApiError."""
    asked = parse(MessagesRequest, body)
    chat = _planned(served, asked, request_id)
    ignored = (*chat.unshown, *asked.without_effect())
    return msgspec.structs.replace(chat, envelope=msgspec.structs.replace(chat.envelope, ignored=ignored))


def answer_count(served: Served, body: Mapping[str, Any], request_id: str) -> AnswerPlan:
    """How many tokens a prompt has. Raises ApiError."""
    asked = parse(CountRequest, body)
    chat = _planned(served, asked, request_id)
    counted = {"input_tokens": chat.requests[0].prompt_tokens}
    return AnswerPlan(body=msgspec.json.encode(counted), ignored=(*chat.unshown, *asked.without_effect()))


def _planned(served: Served, asked: CountRequest, request_id: str) -> ChatPlan:
    body = asked.chat()  # what is wrong here is told in the client's words already
    try:
        return renamed_plan(plan_chat(served, body, request_id), asked.names())
    except ApiError as error:
        raise renamed(error, asked.names()) from None
