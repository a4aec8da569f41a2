"""Probes: when a container is checked, what a row of answers means, and the HTTP request itself.

`Probe` and `Tracker` decide and know no clock; `http_get` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import aiohttp

from banyan_operator.plan import Manifest

ProbeKind = Literal["startup", "readiness", "liveness"]
KINDS: tuple[ProbeKind, ...] = ("startup", "readiness", "liveness")
STARTUP_CHECK_S = 1.0
"""Startup checks come at least this often: here they cost nothing, and a wait is seen by whoever sits before the screen.
How long a start may take stays periodSeconds x failureThreshold."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe as the pod spec writes it, with the API's defaults. Times in seconds."""

    kind: ProbeKind
    path: str
    port: int | str
    scheme: str
    initial_delay: float
    period: float
    timeout: float
    failures: int
    successes: int

    @staticmethod
    def of(kind: ProbeKind, spec: Manifest) -> Probe | None:
        """None for exec, gRPC and TCP probes: Banyan never writes one, and one from a podTemplate is not checked in local mode."""
        get = spec.get("httpGet")
        if get is None:
            return None
        return Probe(
            kind=kind,
            path=get.get("path", "/"),
            port=get["port"],
            scheme=get.get("scheme", "HTTP").lower(),
            initial_delay=spec.get("initialDelaySeconds", 0),
            period=spec.get("periodSeconds", 10),
            timeout=spec.get("timeoutSeconds", 1),
            failures=spec.get("failureThreshold", 3),
            successes=spec.get("successThreshold", 1),
        )


class Tracker:
    """One probe of one running container: the next check, and the state that the last answers add up to."""

    def __init__(self, probe: Probe, now: float) -> None:
        self.probe = probe
        self.passed = False
        self.failed = False
        """The threshold of failures was reached; for startup and liveness that ends the container."""
        self.last_text = ""
        self.due: float | None = now + probe.initial_delay
        """When to check next; None while a check is under way."""
        self._first = now + probe.initial_delay
        self._row = 0  # of equal answers, the last one included
        self._last_ok: bool | None = None

    def sent(self) -> None:
        self.due = None

    def answered(self, ok: bool, text: str, now: float) -> None:
        probe = self.probe
        self._row = self._row + 1 if ok == self._last_ok else 1
        self._last_ok = ok
        self.last_text = text
        if ok and self._row >= probe.successes:
            self.passed, self.failed = True, False
        if probe.kind == "startup":
            self.due = now + min(probe.period, STARTUP_CHECK_S)
            self.failed = not ok and now - self._first >= probe.period * probe.failures
        else:
            self.due = now + probe.period
            if not ok and self._row >= probe.failures:
                self.passed, self.failed = False, True


async def http_get(session: aiohttp.ClientSession, url: str, timeout_s: float) -> tuple[bool, str]:
    """Whether `url` answers with 200 to 399, and what the kubelet would say if not."""
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(url, timeout=timeout, allow_redirects=False) as response:
            await response.read()
            return 200 <= response.status < 400, f"HTTP probe failed with statuscode: {response.status}"
    except TimeoutError:
        return False, f"Get {url}: no answer within {timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return False, f"Get {url}: {error}"
