"""The finished run whose failed lines another one runs again. Everything blocks; raises the errors of `batch.errors` and the store's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from banyan_runtime.batch.documents import Completes, InputObject
from banyan_runtime.batch.errors import InputChanged, InputInvalid, InputNotFound
from banyan_runtime.batch.planner import Kept, custom_ids
from banyan_runtime.batch.records import MANIFEST, OUTPUT, Manifest
from banyan_runtime.batch.source import Source, found_again
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
            raise InputNotFound("there is no finished run to complete (no manifest.json)", value=where.uri) from error
        if manifest.endpoint != endpoint:
            raise InputInvalid(f"run {manifest.run} called {manifest.endpoint}; give the same", field="--endpoint", value=endpoint)
        said = manifest.output
        output = InputObject(place.child(OUTPUT).key, said.uri, said.etag, said.bytes, said.sha256)
        self._output = found_again(place.store, output) or output  # else who reads it finds out

    def source(self) -> Source:
        """Its input, if that is still the same."""
        files = [InputObject.of(file) for file in self.manifest.input]
        source = Source.opened(files, self._open_uri)
        source.check()
        return source

    def kept(self) -> Kept:
        """Its good lines."""
        return Kept(custom_ids(self._blocks()))

    def completes(self, kept: Kept, output: Location, aside: Location) -> Completes:
        """How a run that puts out to `output` names it. What that run will replace is first copied, to `aside`."""
        there = msgspec.structs.replace(self._output, key=output.child(OUTPUT).key)  # by whatever name the output is called
        replaced = found_again(output.store, there)
        source = self._copied(aside) if replaced is not None else self._output
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
        return InputObject(where.key, where.uri, info.tag, info.size, self._output.sha256)

    def _blocks(self) -> Iterator[bytes]:
        try:
            for at in range(0, self._output.bytes, BLOCK_BYTES):
                yield self._place.store.get(self._output.key, start=at, end=at + BLOCK_BYTES, if_match=self._output.tag)
        except Precondition as error:
            raise InputChanged(f"{error}; it is not what the manifest beside it says") from error
