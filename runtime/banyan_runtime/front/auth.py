"""API keys. Closed by default: with a key configured, every path but the probes and metrics asks for one."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.front.errors import bad_key
from banyan_runtime.front.metrics import Metrics

OPEN_PATHS: Final = frozenset({"/livez", "/health", "/healthz", "/health_generate", "/readyz", "/ready", "/metrics", "/metrics/load"})
LOOK_AGAIN_S: Final = 1.0  # how often the file of keys is looked at
log = logging.getLogger("banyan")


class Keys:
    """The valid keys, held as digests. `file` is read again when it changes; a file that went bad keeps the old keys."""

    def __init__(self, keys: Iterable[str], file: Path | None) -> None:
        self._fixed = frozenset(_digest(key) for key in keys)
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        self._looked = 0.0
        self._read_keys: frozenset[bytes] = frozenset()
        if file is not None:
            try:
                self._read(file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--api-keys-file={file} cannot be used: {error}") from error

    @staticmethod
    def of(config: ServerConfig) -> Keys | None:
        """None: no key is asked for."""
        if config.api_key is None and config.api_keys_file is None:
            return None
        return Keys([config.api_key] if config.api_key else [], Path(config.api_keys_file) if config.api_keys_file else None)

    def valid(self, key: str) -> bool:
        """Takes as long for a wrong key as for a right one."""
        self._look()
        given = _digest(key)
        matches = [hmac.compare_digest(given, known) for known in self._fixed | self._read_keys]
        return any(matches)

    def _look(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked < LOOK_AGAIN_S:
            return
        self._looked = now
        try:
            status = self._file.stat()
            if (status.st_mtime_ns, status.st_size, status.st_ino) != self._stamp:
                self._read(self._file)
                log.info("read %d API keys from %s", len(self._read_keys), self._file)
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read, so the keys stay as they are: %s", self._file, error)

    def _read(self, file: Path) -> None:
        status = file.stat()
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        keys = [key for key in keys if key and not key.startswith("#")]
        self._stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if not keys:
            raise ValueError("it holds no key (one a line)")
        self._read_keys = frozenset(_digest(key) for key in keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def presented_key(headers: Headers) -> str | None:
    """The key of a request: Bearer, Anthropic's `x-api-key`, or Azure's `api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or headers.get("api-key")


class Auth:
    """ASGI middleware: 401 for whoever has no valid key."""

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            key = presented_key(Headers(scope=scope))
            if key is None or not self._keys.valid(key):
                self._metrics.rejected("auth")
                await bad_key().response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
