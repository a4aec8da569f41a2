"""The HTTP request that the running code works for: what its log lines and its spans have in common.

Kept in a context variable, because what it says concerns many and is decided by few. It holds nothing large: tasks that outlive the
request keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from banyan_runtime.front.metrics import RequestRecord
    from banyan_runtime.front.plan import GenerateRequest


class Trace:
    """What a trace is told of its request. This one takes it to nobody."""

    id = ""  # as W3C writes it; "": there is none

    def submitted(self, endpoint: str, requests: Sequence[GenerateRequest], ids: Sequence[str], *, streaming: bool) -> None:
        """The request asks the engine for these sequences."""

    def begun(self) -> None:
        """The engine has one of them; `ended` follows."""

    def ended(self, record: RequestRecord | None) -> None:
        """One of them has ended, None: it was refused."""


@dataclass(slots=True)
class Current:
    """One HTTP request."""

    id: str = ""  # X-Request-Id
    owner: str | None = ""  # who asks (`auth.OWNER`)
    trace: Trace = field(default_factory=Trace)

    def log_fields(self) -> dict[str, str]:
        """What a JSON line about the request says of it."""
        fields = {"request_id": self.id, "trace_id": self.trace.id}
        return {name: value for name, value in fields.items() if value}


_current: ContextVar[Current | None] = ContextVar("banyan.current", default=None)


def begin() -> Current:
    """A request has come; what runs in this task, and in what it starts, works for it."""
    request = Current()
    _current.set(request)
    return request


def current() -> Current:
    """Whom the running code works for; a new one, known to nobody else, where it works for nobody in particular."""
    return _current.get() or Current()


def log_fields() -> dict[str, str]:
    """What a JSON line of the running code says of whom it works for."""
    request = _current.get()
    return {} if request is None else request.log_fields()
