"""What every request handler needs, put together once by the composition root (`serve.py`) and passed, never global."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.live import LiveRequests
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.plan import Preparer
from banyan_runtime.front.state import ServerState
from banyan_runtime.front.text.text import Text


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
    live: LiveRequests = field(default_factory=LiveRequests)
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds, the `created` of the model cards
