"""Where a run's results go: two uploads that stay invisible until both are whole, then the manifest.

Everything blocks; a run calls it from one thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from banyan_runtime.batch.errors import OutputExists, from_store
from banyan_runtime.batch.protocol import RUN_METADATA, Condition, Published, Refuse, plan_publication
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, InputFile, Manifest, Record, RequestCounts, ResultFile, Usage
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.store import NotFound, ObjectInfo, Precondition, StoreError, Upload


@dataclass(frozen=True, slots=True)
class Outputs:
    """A place that was checked and found writable. `fenced`: the storage keeps conditional writes."""

    location: Location
    conditions: Mapping[str, Condition]
    fenced: bool


def prepare(location: Location, *, run: str, overwrite: bool) -> Outputs | Manifest:
    """Check the output before any work is done; the manifest, if this very run published already.

    Raises OutputExists, AccessDenied, OutputNotFound, StorageUnavailable, InvalidSpec.
    """
    with _errors(location):
        fenced = _probe(location.child(f".banyan-probe-{run}"))
        found = {name: _head(location.child(name)) for name in (OUTPUT, ERRORS, MANIFEST)}
        manifest = _manifest(location) if found[MANIFEST] is not None else None
    decision = plan_publication(found, run=run, published_run=manifest.run if manifest else None, overwrite=overwrite)
    if isinstance(decision, Refuse):
        where = location.child(decision.name).uri
        raise OutputExists(f"{where} exists; choose another output, remove it, or allow overwriting (--overwrite)")
    if isinstance(decision, Published):
        assert manifest is not None
        return manifest
    return Outputs(location, decision.conditions, fenced)


def _probe(where: Location) -> bool:
    """Whether we may write here, and whether a create is refused where something is."""
    where.store.put(where.key, b"", if_none_match=True)
    try:
        where.store.put(where.key, b"", if_none_match=True)
        return False
    except Precondition:
        return True
    finally:
        # a role that may write but not delete leaves one empty object behind; no reason to stop
        with contextlib.suppress(StoreError):
            where.store.delete(where.key)


def _head(where: Location) -> ObjectInfo | None:
    try:
        return where.store.head(where.key)
    except NotFound:
        return None


def _manifest(location: Location) -> Manifest | None:
    where = location.child(MANIFEST)
    try:
        return Manifest.decode(where.store.get(where.key))
    except (ValueError, NotFound):
        return None


class Sink:
    """Takes records in input order and publishes them."""

    def __init__(self, outputs: Outputs, run: str) -> None:
        self._outputs = outputs
        self._run = run
        self._output = _Results(outputs, OUTPUT, run)
        self._errors = _Results(outputs, ERRORS, run)

    def write(self, records: list[Record]) -> None:
        with _errors(self._outputs.location):
            self._output.write([record.line for record in records if record.kind == "output"])
            self._errors.write([record.line for record in records if record.kind == "error"])

    def publish(self, *, created_at: str, endpoint: str, inputs: list[InputFile], counts: RequestCounts, usage: Usage) -> Manifest:
        """Make the results visible: output, errors, then the manifest that says that both are there."""
        outputs, where = self._outputs, self._outputs.location.child(MANIFEST)
        with _errors(outputs.location):
            if outputs.conditions[MANIFEST].if_match is not None:
                where.store.delete(where.key)  # an old manifest must not vouch for new results
            manifest = Manifest(
                version=1,
                run=self._run,
                created_at=created_at,
                endpoint=endpoint,
                input=inputs,
                output=self._output.complete(),
                errors=self._errors.complete(),
                request_counts=counts,
                usage=usage,
            )
            where.store.put(where.key, manifest.encode(), if_none_match=True, metadata={RUN_METADATA: self._run})
        return manifest

    def abort(self) -> None:
        """Leave nothing of what was not published."""
        for results in (self._output, self._errors):
            with contextlib.suppress(StoreError):
                results.upload.abort()


class _Results:
    """One of the two result files."""

    def __init__(self, outputs: Outputs, name: str, run: str) -> None:
        self._where = outputs.location.child(name)
        self._condition = outputs.conditions[name]
        self._hash = hashlib.sha256()
        self._lines = 0
        with _errors(outputs.location):
            self.upload: Upload = self._where.store.upload(self._where.key, metadata={RUN_METADATA: run})

    def write(self, lines: list[bytes]) -> None:
        if lines:
            data = b"".join(lines)
            self._lines += len(lines)
            self._hash.update(data)
            self.upload.write(data)

    def complete(self) -> ResultFile:
        info = self.upload.complete(if_match=self._condition.if_match, if_none_match=self._condition.if_none_match)
        return ResultFile(self._where.uri, info.tag, info.size, self._hash.hexdigest(), self._lines)


@contextlib.contextmanager
def _errors(location: Location) -> Iterator[None]:
    try:
        yield
    except Precondition as error:
        raise OutputExists(f"{error}: somebody else wrote results to {location.uri} during this run") from error
    except StoreError as error:
        raise from_store(error, reading=False) from error
