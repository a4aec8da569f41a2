"""What every request handler needs, put together once by the composition root (`serve.py`) and passed, never global."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.auth import Gate
from banyan_runtime.front.body import BodyBudget
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.keys import InternalKey
from banyan_runtime.front.live import LiveRequests
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.openai.responses.store import ResponseStore
from banyan_runtime.front.ops.probe import GenerationProbe
from banyan_runtime.front.plan import Preparer
from banyan_runtime.front.relay import Backend
from banyan_runtime.front.request_log import Discreet, RequestLog
from banyan_runtime.front.state import ServerState
from banyan_runtime.front.text.text import Text

if TYPE_CHECKING:
    from banyan_runtime.front.openai.responses.run import Run


@dataclass(slots=True)
class Context:
    """The parts of one front process. `text` and `preparer` are None until the tokenizer is loaded; requests are refused until
    then."""

    config: ServerConfig
    client: EngineClient
    text: Text | None
    metrics: Metrics
    state: ServerState
    preparer: Preparer | None = None
    batch_host: Backend | None = None  # None: this process has none
    bodies: BodyBudget = field(default_factory=BodyBudget)
    live: LiveRequests = field(default_factory=LiveRequests)
    request_log: RequestLog = field(default_factory=Discreet)
    responses: ResponseStore = field(default_factory=ResponseStore)
    responses_live: dict[str, Run] = field(default_factory=dict)  # those in the background
    sequences_elsewhere: Callable[[], Awaitable[int]] | None = None  # open in other API processes
    probe: GenerationProbe = field(init=False)
    gate: Gate = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds, the `created` of the model cards
    given_gate: InitVar[Gate | None] = None  # as another process of this server has it

    def __post_init__(self, given_gate: Gate | None) -> None:
        """Raises ConfigError when the API keys cannot be read."""
        self.gate = Gate.of(self.config, InternalKey()) if given_gate is None else given_gate
        if self.gate.asks_users:
            self.metrics.key_names(self.gate.names)
        self.probe = GenerationProbe(self.client)
