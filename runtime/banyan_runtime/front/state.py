"""What the server is doing, as its probes tell it: the phase of start-up, draining, dead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from banyan_runtime import __version__

PhaseName = Literal["starting", "downloading", "loading", "warming", "ready", "draining", "dead"]
PHASES: Final[tuple[PhaseName, ...]] = get_args(PhaseName)
StateName = PhaseName | Literal["hung", "impaired"]
STATES: Final[tuple[StateName, ...]] = (*PHASES, "hung", "impaired")


@dataclass(slots=True)
class ServerState:
    """One server's phase. Written by the composition root alone; read by every request and probe."""

    model_uri: str
    context_length: int | None = None  # tokens; known once the engine is ready
    phase: PhaseName = "starting"
    percent: int = 0  # 0..100 of this phase
    detail: str = ""
    leaving: bool = False  # draining, and requests are still taken: who sends them does not know yet that we go
    hung: bool = False  # the engine has not answered for too long
    impaired: str = ""  # why no request can be taken just now, although the engine is well and what runs goes on
    phase_seconds: dict[str, float] = field(default_factory=dict)  # how long each finished phase took
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0  # monotonic seconds
    phase_started: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.phase_started = self.clock()

    def enter(self, phase: PhaseName, percent: int = 0, detail: str = "") -> None:
        """Note progress. A server that drains or is dead never goes back."""
        if PHASES.index(phase) < PHASES.index("draining") <= PHASES.index(self.phase) or self.phase == "dead":
            return
        if phase != self.phase:
            now = self.clock()
            self.phase_seconds[self.phase] = self.phase_seconds.get(self.phase, 0.0) + now - self.phase_started
            self.phase, self.phase_started = phase, now
        self.percent, self.detail = max(0, min(100, percent)), detail

    @property
    def ready(self) -> bool:
        """Whether requests are asked for."""
        return self.serving and not self.impaired

    @property
    def serving(self) -> bool:
        """Whether requests that were admitted go on."""
        return self.phase == "ready" and not self.hung

    @property
    def draining(self) -> bool:
        return self.phase == "draining"

    @property
    def admits(self) -> bool:
        """Whether a request that comes now is taken."""
        return self.ready or (self.draining and self.leaving and not self.hung and not self.impaired)

    @property
    def alive(self) -> bool:
        """Whether the process is worth keeping: its engine lives (or is still starting) and answers."""
        return self.phase != "dead" and not self.hung

    @property
    def shown(self) -> StateName:
        """The one word for it all, in probes and metrics."""
        if self.hung and self.phase != "dead":
            return "hung"
        return "impaired" if self.impaired and self.serving else self.phase

    def payload(self, silent_s: float = 0.0) -> dict[str, Any]:
        """The body of /readyz. `silent_s`: since the engine's last sign of life, told when it is too long."""
        details = {"hung": f"the engine has not answered for {silent_s:.0f} s", "impaired": self.impaired}
        return {
            "state": self.shown,
            "percent": 100 if self.phase == "ready" else self.percent,
            "detail": details.get(self.shown, self.detail),
            "model": {"uri": self.model_uri, "contextLength": self.context_length},
            "version": __version__,
        }
