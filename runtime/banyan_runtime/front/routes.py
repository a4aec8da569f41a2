"""The table of routes: every path that the server answers, and who may ask. What stands nowhere here is a 404, for those who have
a key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.config import ServerConfig
from banyan_runtime.front import docs
from banyan_runtime.front.anthropic import messages as anthropic
from banyan_runtime.front.anthropic.errors import error_response
from banyan_runtime.front.anthropic.schema import EXTRAS, CountRequest, MessagesRequest
from banyan_runtime.front.auth import Access
from banyan_runtime.front.context import Context
from banyan_runtime.front.docs import EVENTS, JSON, TEXT, Content, Told
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.native import control, generate, info, tokenize
from banyan_runtime.front.native.schema import DetokenizeRequest, NativeGenerateRequest, TokenizeRequest
from banyan_runtime.front.openai import batches, chat, completions, embeddings, files, models, rerank, score
from banyan_runtime.front.openai.responses import routes as responses
from banyan_runtime.front.openai.responses.schema import PASSED_ON, ResponsesRequest
from banyan_runtime.front.openai.schema import ChatRequest, CompletionRequest
from banyan_runtime.front.openai.vector_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from banyan_runtime.front.ops import loads
from banyan_runtime.front.ops import routes as ops
from banyan_runtime.front.parsing import RequestModel

PAGE: Final = ("limit", "order", "after")  # of lists
EITHER: Final = (JSON, EVENTS)  # as the request says
CHAT_FIELDS: Final = {
    "ResponsesRequest": PASSED_ON,
    "MessagesRequest": frozenset(EXTRAS),
    "CountRequest": frozenset({"chat_template_kwargs"}),
}
"""By the name of a body's model: the fields of chat completions that it takes too."""
MESSAGES: Final = "/v1/messages"
"""What lies here and below is told its errors in Anthropic's form."""
UNSERVED: Final = frozenset({"/v1/responses/compact"})
"""Paths of OpenAI's that are not served, and would be taken for one with an id."""
_COMMANDS: Final = (control.abort_request, control.abort_requests)
_AT_ONCE: Final = (responses.input_tokens, anthropic.count_tokens, tokenize.tokenize, tokenize.detokenize)  # without the engine
Handler = Callable[[Context, Request], Awaitable[Response]]


def _first_process(config: ServerConfig) -> bool:
    return False


def _anywhere(config: ServerConfig) -> bool:
    return True


def _keeps_no_responses(config: ServerConfig) -> bool:
    """Then none can be stored, referred to or run in the background, whatever a request says."""
    return config.response_store_seconds <= 0


@dataclass(frozen=True, slots=True)
class Route:
    """One row. `path` as Starlette's; `methods` separated by blanks; `body`: the model of its JSON body, or its content as OpenAPI has
    it; `query`: the parameters that it reads; `gives`: the media types of its answer, none for one without a body; `when`: where the
    options ask for it; `serves`: where it does not only refuse; `refuse`: an error in its API's form; `spread`: whether a POST
    needs nothing that only the first process of the server has (stored responses, batches, the server's state), so any may answer it.
    That is decided by the request line alone, before anything of a body is read."""

    path: str
    methods: str
    handler: Handler
    access: Access
    body: type[RequestModel] | Content | None = None
    query: tuple[str, ...] = ()
    gives: tuple[str, ...] = (JSON,)
    when: Callable[[ServerConfig], bool] = lambda config: True
    serves: Callable[[ServerConfig], bool] = lambda config: True
    refuse: Callable[[ApiError, str], Response] = lambda error, request_id: error.response()
    spread: Callable[[ServerConfig], bool] = _first_process

    @property
    def told(self) -> Told:
        """What its description says."""
        planned = isinstance(self.body, type) and self.handler not in _COMMANDS
        return Told(
            body=self.body,
            query=self.query,
            gives=self.gives,
            access=self.access,
            planned=planned,
            queued=planned and self.handler not in _AT_ONCE,
            error="MessagesError" if self.refuse is error_response else "Error",
        )


def _text(config: ServerConfig) -> bool:
    return config.serves_text


def _vectors(config: ServerConfig) -> bool:
    return config.serves_vectors


ROUTES: Final[tuple[Route, ...]] = (
    Route("/v1/models", "GET", models.list_models, Access.INTERNAL),
    Route("/v1/models/{name:path}", "GET", models.one_model, Access.USER),
    Route(
        "/v1/chat/completions",
        "POST",
        chat.chat_completions,
        Access.INTERNAL,
        body=ChatRequest,
        gives=EITHER,
        serves=_text,
        spread=_anywhere,
    ),
    Route(
        "/v1/responses",
        "POST",
        responses.create_response,
        Access.INTERNAL,
        body=ResponsesRequest,
        gives=EITHER,
        serves=_text,
        spread=_keeps_no_responses,
    ),
    Route(
        "/v1/responses/input_tokens",
        "POST",
        responses.input_tokens,
        Access.USER,
        body=ResponsesRequest,
        serves=_text,
        spread=_keeps_no_responses,
    ),
    Route("/v1/responses/{id}", "GET", responses.get_response, Access.USER, query=("stream", "starting_after"), gives=EITHER),
    Route("/v1/responses/{id}", "DELETE", responses.delete_response, Access.USER),
    Route("/v1/responses/{id}/cancel", "POST", responses.cancel_response, Access.USER),
    Route("/v1/responses/{id}/input_items", "GET", responses.list_input_items, Access.USER, query=("after", "limit", "order")),
    Route(
        MESSAGES,
        "POST",
        anthropic.messages,
        Access.USER,
        body=MessagesRequest,
        gives=EITHER,
        serves=_text,
        refuse=error_response,
        spread=_anywhere,
    ),
    Route(
        f"{MESSAGES}/count_tokens",
        "POST",
        anthropic.count_tokens,
        Access.USER,
        body=CountRequest,
        serves=_text,
        refuse=error_response,
        spread=_anywhere,
    ),
    Route(
        "/v1/completions",
        "POST",
        completions.completions,
        Access.INTERNAL,
        body=CompletionRequest,
        gives=EITHER,
        serves=_text,
        spread=_anywhere,
    ),
    Route("/v1/embeddings", "POST", embeddings.embeddings, Access.INTERNAL, body=EmbeddingRequest, serves=_vectors, spread=_anywhere),
    Route("/v1/score", "POST", score.score, Access.USER, body=ScoreRequest, spread=_anywhere),
    Route("/score", "POST", score.score, Access.USER, body=ScoreRequest, spread=_anywhere),
    Route("/v1/rerank", "POST", rerank.rerank, Access.USER, body=RerankRequest, spread=_anywhere),
    Route("/v2/rerank", "POST", rerank.rerank, Access.USER, body=RerankRequest, spread=_anywhere),
    Route("/rerank", "POST", rerank.rerank, Access.USER, body=RerankRequest, spread=_anywhere),
    Route("/v1/files", "POST", files.create_file, Access.USER, body=files.UPLOAD),
    Route("/v1/files", "GET", files.list_files, Access.USER, query=("purpose", *PAGE)),
    Route("/v1/files/{id}", "GET", files.get_file, Access.USER),
    Route("/v1/files/{id}", "DELETE", files.delete_file, Access.USER),
    Route("/v1/files/{id}/content", "GET", files.get_file_content, Access.USER, gives=("application/octet-stream",)),
    Route("/v1/batches", "POST", batches.create_batch, Access.USER, body=batches.CREATE),
    Route("/v1/batches", "GET", batches.list_batches, Access.USER, query=PAGE),
    Route("/v1/batches/{id}", "GET", batches.get_batch, Access.USER),
    Route("/v1/batches/{id}/cancel", "POST", batches.cancel_batch, Access.USER),
    Route("/generate", "POST PUT", generate.generate, Access.USER, body=NativeGenerateRequest, gives=EITHER, spread=_anywhere),
    Route("/model_info", "GET", info.model_info, Access.USER),
    Route("/get_model_info", "GET", info.model_info, Access.USER),
    Route("/server_info", "GET", info.server_info, Access.INTERNAL),
    Route("/get_server_info", "GET", info.server_info, Access.USER),
    Route("/version", "GET", info.version, Access.USER),
    Route("/tokenizer_info", "GET", info.tokenizer_info, Access.USER, when=lambda config: config.enable_tokenizer_info_endpoint),
    Route("/flush_cache", "GET POST", control.flush_cache, Access.ADMIN, query=("timeout",), gives=(TEXT,)),
    Route("/reset_prefix_cache", "POST", control.flush_cache, Access.ADMIN, query=("timeout",), gives=(TEXT,)),
    Route("/abort_request", "POST", control.abort_request, Access.USER, body=control.AbortRequest, gives=()),
    Route("/abort_requests", "POST", control.abort_requests, Access.USER, body=control.AbortRequests, gives=()),
    Route("/tokenize", "POST", tokenize.tokenize, Access.USER, body=TokenizeRequest, spread=_anywhere),
    Route("/v1/tokenize", "POST", tokenize.tokenize, Access.USER, body=TokenizeRequest, spread=_anywhere),
    Route("/detokenize", "POST", tokenize.detokenize, Access.USER, body=DetokenizeRequest, spread=_anywhere),
    Route("/v1/detokenize", "POST", tokenize.detokenize, Access.USER, body=DetokenizeRequest, spread=_anywhere),
    Route("/", "GET", ops.banner, Access.OPEN, gives=(TEXT,)),
    Route("/ping", "GET", ops.livez, Access.OPEN, gives=()),
    Route("/livez", "GET", ops.livez, Access.OPEN, gives=()),
    Route("/health", "GET", ops.health, Access.OPEN, gives=()),
    Route("/healthz", "GET", ops.livez, Access.OPEN, gives=()),
    Route("/readyz", "GET", ops.readyz, Access.OPEN),
    Route("/ready", "GET", ops.readyz, Access.OPEN),
    Route("/health_generate", "GET", ops.health_generate, Access.OPEN, gives=()),
    Route("/metrics", "GET", ops.metrics_page, Access.OPEN, gives=(TEXT,)),
    Route("/metrics/load", "GET", ops.load_page, Access.OPEN, gives=(TEXT,)),
    Route("/v1/loads", "GET", loads.loads, Access.USER, query=loads.QUERY, gives=(JSON, TEXT)),
    Route("/load", "GET", loads.load, Access.USER),
    Route("/openapi.json", "GET", docs.openapi, Access.USER),
    Route("/docs", "GET", docs.docs, Access.USER, gives=("text/html",)),
)
OPEN_PATHS: Final = frozenset(route.path for route in ROUTES if route.access is Access.OPEN)


def takes_posts(path: str, config: ServerConfig) -> bool:
    """Whether a server with these options answers what is POSTed to exactly this path."""
    asked = (route for route in ROUTES if route.path == path and "POST" in route.methods.split())
    return any(route.when(config) and route.serves(config) for route in asked)


def spread_paths(config: ServerConfig) -> frozenset[str]:
    """Whose POSTs any API process may answer."""
    return frozenset(route.path for route in ROUTES if route.spread(config) and route.when(config))
