"""The finished run whose failed lines another one runs again. Everything blocks; raises the errors of `batch.errors` and the store's."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Final

from banyan_runtime.batch.documents import Completes, InputObject
from banyan_runtime.batch.errors import InputChanged, InputInvalid, InputNotFound
from banyan_runtime.batch.planner import Kept, custom_ids
from banyan_runtime.batch.records import MANIFEST, OUTPUT, Manifest
from banyan_runtime.batch.source import Source
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.store import Damaged, NotFound, Precondition

BLOCK_BYTES: Final = 4 << 20
OpenUri = Callable[[str], Location]


class Earlier:
    """A run that has published at `place`. `open_uri` opens what its manifest names as its input."""

    def __init__(self, place: Location, open_uri: OpenUri, endpoint: str) -> None:
        self._place = place
        self._open_uri = open_uri
        where = place.child(MANIFEST)
        try:
            self.manifest = manifest = Manifest.decode(where.store.get(where.key))
        except (NotFound, Damaged) as error:
            raise InputNotFound(f"{where.uri}: there is no finished run to complete (no manifest.json)") from error
        if manifest.endpoint != endpoint:
            raise InputInvalid(f"--endpoint={endpoint}: run {manifest.run} called {manifest.endpoint}; give the same")
        self._output = InputObject(place.child(OUTPUT).key, manifest.output.uri, self._tag(manifest), manifest.output.bytes)

    def _tag(self, manifest: Manifest) -> str:
        """Of its output; of a copy that holds the same bytes its own."""
        said, where = manifest.output, self._place.child(OUTPUT)
        with contextlib.suppress(NotFound, Precondition):  # who reads it finds out
            found = where.store.head(where.key)
            if found.tag != said.etag and found.size == said.bytes:
                digest = hashlib.sha256()
                for block in self._read(found.size, found.tag):
                    digest.update(block)
                return found.tag if digest.hexdigest() == said.sha256 else said.etag
        return said.etag

    def source(self) -> Source:
        """Its input, if that is still the same."""
        files = [InputObject("", file.uri, file.etag, file.bytes) for file in self.manifest.input]
        source = Source.opened(files, self._open_uri)
        source.check()
        return source

    def kept(self) -> Kept:
        """Its good lines."""
        return Kept(custom_ids(self._blocks()))

    def completes(self, kept: Kept, output: Location, aside: Location) -> Completes:
        """How a run that puts out to `output` names it. What that run will replace is first copied, to `aside`."""
        source = self._copied(aside) if output.uri == self._place.uri else self._output
        return Completes(self.manifest.run, source, kept.lines, self.manifest.usage)

    def _copied(self, where: Location) -> InputObject:
        upload = where.store.upload(where.key)
        try:
            for block in self._blocks():
                upload.write(block)
            info = upload.complete(if_none_match=True)
        except BaseException:
            upload.abort()
            raise
        return InputObject(where.key, where.uri, info.tag, info.size)

    def _blocks(self) -> Iterator[bytes]:
        try:
            yield from self._read(self._output.bytes, self._output.tag)
        except Precondition as error:
            raise InputChanged(f"{error}; it is not what the manifest beside it says") from error

    def _read(self, size: int, tag: str) -> Iterator[bytes]:
        """Its output, at that version."""
        where = self._place.child(OUTPUT)
        for at in range(0, size, BLOCK_BYTES):
            yield where.store.get(where.key, start=at, end=at + BLOCK_BYTES, if_match=tag)
