"""Which requests any process of the front may answer."""

from __future__ import annotations

from typing import Final

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.routes import spread_paths

_POST: Final = b"POST "


class Paths:
    """Decides from the beginning of a request. Whatever is written in an unusual way is the first process's to answer."""

    def __init__(self, config: ServerConfig) -> None:
        self._spread = spread_paths(config)
        self._longest = max(map(len, self._spread))

    def spread(self, begun: bytes) -> bool:
        """`begun`: bytes of a request from its first on."""
        if not begun.startswith(_POST):
            return False
        url, blank, _ = begun[len(_POST) : len(_POST) + self._longest + 1].partition(b" ")
        if b"?" in url:
            return url.partition(b"?")[0] in self._spread
        return bool(blank) and url in self._spread

    def asked(self, method: bytes, url: bytes) -> bool:
        """The same of a request line that was read."""
        return method == b"POST" and url.partition(b"?")[0] in self._spread
