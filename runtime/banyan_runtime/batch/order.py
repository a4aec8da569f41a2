"""What a run is asked to do, and how its workers go about it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from banyan_runtime.batch.planner import Cut
from banyan_runtime.batch.segments import SEGMENT_BYTES
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.patience import Patience


@dataclass(frozen=True, slots=True)
class Pace:
    """How a worker goes about it."""

    max_concurrency: int = 64
    checkpoint_s: float = 15.0
    lease_s: float = 60.0
    segment_bytes: int = SEGMENT_BYTES
    workers: int = 1  # how many there are, as far as is known


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for. One of `input` and `completes` is given; `completes`: the output of a finished run, whose failed lines
    run again.
    """

    output: Location
    endpoint: str
    input: Location | None = None
    completes: Location | None = None
    open_uri: Callable[[str], Location] | None = None  # opens what the manifest of `completes` names as its input
    model: str | None = None
    priority: int | None = None
    force_priority: bool = False  # whatever lines ask for
    strict: bool = False  # refuse an input with lines that cannot be sent
    overwrite: bool = False
    run: str | None = None  # None: a new one, or the one that the same order has left unfinished
    allow_unfenced: bool = False
    max_error_percent: int = 100
    begun: bool = False  # by this run's plan, which found the storage in order
    patience: Patience = field(default_factory=Patience)  # of the calls to the storage
    cut: Cut = field(default_factory=Cut)
    pace: Pace = field(default_factory=Pace)

    @property
    def digest(self) -> str:
        """Equal for orders that ask for the same."""
        source = self.input or self.completes
        assert source is not None
        asked = (source.uri, self.completes is not None, self.endpoint, self.model, self.priority, self.strict)
        return hashlib.blake2b(repr(asked).encode(), digest_size=16).hexdigest()
