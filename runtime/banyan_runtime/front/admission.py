"""Whether the server takes requests at all."""

from __future__ import annotations

from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import unavailable


def admit(context: Context) -> None:
    """Refuse work while the server cannot do it. Raises ApiError 503."""
    state = context.state
    if state.draining and not state.leaving:
        raise unavailable("The server is shutting down; try another one.")
    if state.impaired and (state.serving or state.leaving):
        raise unavailable("The server cannot prepare requests just now.")  # /readyz says why, which may name files
    if not state.admits or context.text is None:
        detail = f" ({state.phase}, {state.percent} %)" if state.phase in ("starting", "downloading", "loading", "warming") else ""
        raise unavailable(f"The model is not ready{detail}." if detail else "The engine is not available.")
