"""From the bytes of a request to its plan: JSON, types, checks, chat template, tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.body import decode_object
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import Endpoint, Plan
from banyan_runtime.front.prepare.chat import plan_chat
from banyan_runtime.front.prepare.completions import plan_completion
from banyan_runtime.front.prepare.native import plan_generate
from banyan_runtime.front.prepare.sequences import Served
from banyan_runtime.front.prepare.tokenize import answer_detokenize, answer_tokenize
from banyan_runtime.front.text.text import Text

Body = bytes | bytearray | memoryview

_PLANS: Final[Mapping[Endpoint, Callable[[Served, Mapping[str, Any], str], Plan]]] = {
    "chat": plan_chat,
    "completions": plan_completion,
    "generate": plan_generate,
    "tokenize": answer_tokenize,
    "detokenize": answer_detokenize,
}


class Planner:
    """Plans requests for one model. Knows neither the engine's state nor the time: equal requests have equal plans."""

    def __init__(self, config: ServerConfig, text: Text, info: wire.EngineInfo) -> None:
        self._served = Served(config, text, info)

    def plan(self, endpoint: Endpoint, body: Body, request_id: str) -> Plan:
        """Raises ApiError for whatever is wrong with the request."""
        try:
            return _PLANS[endpoint](self._served, decode_object(body), request_id)
        except MemoryError:
            raise ApiError(413, "The request takes too much memory to read.", code="request_too_large") from None
