"""From the bytes of a request to its plan: JSON, types, checks, chat template, tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.body import decode_object
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.openai.responses.references import Before
from banyan_runtime.front.plan import Endpoint, Plan
from banyan_runtime.front.prepare.chat import plan_chat
from banyan_runtime.front.prepare.completions import plan_completion
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.embeddings import plan_embeddings
from banyan_runtime.front.prepare.messages import answer_count, plan_message
from banyan_runtime.front.prepare.native import plan_generate
from banyan_runtime.front.prepare.responses import answer_input_tokens, answer_previous, plan_response
from banyan_runtime.front.prepare.scoring import plan_rerank, plan_score
from banyan_runtime.front.prepare.sequences import Served
from banyan_runtime.front.prepare.tokenize import answer_detokenize, answer_tokenize
from banyan_runtime.front.text.text import Text

Body = bytes | bytearray | memoryview

_PLANS: Final[Mapping[Endpoint, Callable[[Served, Mapping[str, Any], str], Plan]]] = {
    "chat": plan_chat,
    "responses": plan_response,
    "previous": answer_previous,
    "input_tokens": answer_input_tokens,
    "messages": plan_message,
    "count_tokens": answer_count,
    "completions": plan_completion,
    "generate": plan_generate,
    "tokenize": answer_tokenize,
    "detokenize": answer_detokenize,
    "embeddings": plan_embeddings,
    "score": plan_score,
    "rerank": plan_rerank,
}
_WITHOUT_TEXT: Final[frozenset[Endpoint]] = frozenset({"tokenize", "detokenize", "embeddings", "score", "rerank"})


_WITH_HISTORY: Final[frozenset[Endpoint]] = frozenset({"responses", "input_tokens"})


def _with_history(body: Body) -> Mapping[str, Any]:
    """A request, and before it, on a line of its own, what the server knows of it."""
    before, _, request = bytes(body).partition(b"\n")
    return {"before": msgspec.json.decode(before, type=Before), "request": decode_object(request)}


class Planner:
    """Plans requests for one model. Knows neither the engine's state nor the time: equal requests have equal plans."""

    def __init__(self, config: ServerConfig, text: Text, info: wire.EngineInfo, constraints: Constraints | None = None) -> None:
        """Without `constraints` no output can be held to a grammar."""
        self.constraints = constraints or Constraints(None)
        self._served = Served(config, text, info, self.constraints)

    def plan(self, endpoint: Endpoint, body: Body, request_id: str) -> Plan:
        """Raises ApiError for whatever is wrong with the request."""
        self._check(endpoint)  # whatever it asks for
        try:
            asked = _with_history(body) if endpoint in _WITH_HISTORY else decode_object(body)
            return _PLANS[endpoint](self._served, asked, request_id)
        except MemoryError:
            raise ApiError(413, "The request takes too much memory to read.", code="request_too_large") from None

    def plan_of(self, endpoint: Endpoint, asked: Mapping[str, Any], request_id: str) -> Plan:
        """As `plan`, of a body that is read already."""
        self._check(endpoint)
        return _PLANS[endpoint](self._served, asked, request_id)

    def _check(self, endpoint: Endpoint) -> None:
        """Raises ApiError where the server is not for it."""
        if not self._served.config.serves_text and endpoint not in _WITHOUT_TEXT:
            message = "This server serves vectors instead of text (--is-embedding); --enable-embeddings would have it serve both."
            raise ApiError(400, message, code="unsupported")
