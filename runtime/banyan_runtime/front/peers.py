"""What metrics tell to series under another server's names, whoever has them (`compat/`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from banyan_runtime import wire
from banyan_runtime.exposition import Cell, Page

if TYPE_CHECKING:
    from banyan_runtime.front.metrics import RequestRecord


class Peer(Protocol):
    """The series of another server, under its names, beside ours: for dashboards and endpoint pickers made for it."""

    load_pages: Sequence[Page]  # what pickers read
    pages: Sequence[Page]  # all else

    def engine_ready(self, info: wire.EngineInfo) -> None: ...

    def first_token(self, seconds: float, *, streaming: bool) -> None: ...

    def request_finished(self, record: RequestRecord) -> None: ...

    def inter_token_latency(self, seconds: float, requests: int) -> None: ...

    def take_load(self, stats: wire.Stats) -> None: ...

    def take(self, stats: wire.Stats) -> None: ...

    def take_http(self, cells: Mapping[tuple[str, ...], Cell]) -> None:
        """Our counts of HTTP requests by (handler, method, code)."""
        ...


class NoPeer:
    """Our own series are all there is."""

    load_pages: Sequence[Page] = ()
    pages: Sequence[Page] = ()

    def engine_ready(self, info: wire.EngineInfo) -> None: ...

    def first_token(self, seconds: float, *, streaming: bool) -> None: ...

    def request_finished(self, record: RequestRecord) -> None: ...

    def inter_token_latency(self, seconds: float, requests: int) -> None: ...

    def take_load(self, stats: wire.Stats) -> None: ...

    def take(self, stats: wire.Stats) -> None: ...

    def take_http(self, cells: Mapping[tuple[str, ...], Cell]) -> None: ...
