"""Vectors as the engine sends them, and what is made of them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from banyan_runtime.front.answers import Arrival, Outcome, Start, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.generation import Call
from banyan_runtime.front.openai.serving import Identity
from banyan_runtime.front.plan import Endpoint, PooledPlan

Vector = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def begin(context: Context, arrival: Arrival, plan: PooledPlan, endpoint: Endpoint, prefix: str) -> tuple[Identity, Start]:
    """What an answer made of vectors or scores starts with; its id begins with `prefix` unless the client chose one."""
    identity = Identity.of(context, arrival, plan.envelope, prefix)
    call = Call(endpoint=endpoint, streaming=False, received=arrival.received, key=arrival.key)
    return identity, Start(context, call, plan.requests, [identity.id] * len(plan.requests), plan.envelope.ignored)


def unit(raw: bytes, dimensions: int = 0) -> Vector:
    """The direction of a vector: its first `dimensions` (0: all), brought to length 1."""
    return _direction(raw, dimensions).astype(np.float32)


def similarities(outcomes: Sequence[Outcome], pairs: Sequence[tuple[int, int]]) -> Iterator[float]:
    """The cosine of each pair of vectors, one after another: others may have a turn in between."""
    before, left = -1, np.empty(0)
    for one, other in pairs:
        if one != before:
            before, left = one, _direction(outcomes[one].vector)
        yield float(np.clip(left @ _direction(outcomes[other].vector), -1.0, 1.0))


def _direction(raw: bytes, dimensions: int = 0) -> F64:
    values = np.frombuffer(raw, dtype="<f4")[: dimensions or None].astype(np.float64)
    length = float(np.sqrt(values @ values))
    return values / length if length else values


def as_json(vector: Vector, *, packed: bool) -> bytes:
    """A list of numbers, or (`packed`) base64 of little-endian float32."""
    if packed:
        return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
    return to_json(vector.tolist())


def usage(prompt_tokens: Sequence[int]) -> dict[str, Any]:
    total = sum(prompt_tokens)
    return {"prompt_tokens": total, "total_tokens": total}
