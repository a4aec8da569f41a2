"""Objects in an S3 bucket through boto3, made safe where S3 over a real network is not.

Gaps of the client are closed here. A body cut half-way is resumed with a ranged, conditional read. A conditional
write whose answer was lost would see its own object and report a conflict, so every write carries a nonce as metadata
and is read back in doubt. And checksum trailers, which many S3-compatible servers store as if they were data, are only
used with AWS itself.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import botocore.exceptions

from banyan_runtime.storage.patience import Patience, Wait
from banyan_runtime.storage.s3_errors import Conflict, Expired, NoSuchKey, NoSuchUpload, OutOfRange, origin, server_time, tag_of, translated
from banyan_runtime.storage.s3_settings import S3Settings
from banyan_runtime.storage.store import Denied, NotFound, ObjectInfo, Precondition, StoreError, Throttled, Unreachable, Unsupported

PART_BYTES: Final = 16 << 20  # all parts but the last are equal (R2 asks for it); 10,000 of them hold 160 GB
MAX_PARTS: Final = 10_000
CONFLICT_S: Final = 30.0  # that 409 is waited for: another conditional write of the same key is under way
UNSUPPORTED_S: Final = 30.0  # that a storage is asked again for what it says it cannot do, if it has shown that it is in order
CLEANUP_S: Final = 10.0  # how long ending an upload is tried: what stays is swept some day
NONCE: Final = "banyan-write"

_BROKEN_BODY: Final = (
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ResponseStreamingError,
    botocore.exceptions.ReadTimeoutError,
    botocore.exceptions.ConnectionClosedError,
)

T = TypeVar("T")


class S3Store:
    """The objects of one bucket. Every call waits for a storage that is away as `patience` says."""

    def __init__(self, bucket: str, settings: S3Settings, patience: Patience | None = None, *, part_bytes: int = PART_BYTES) -> None:
        self.bucket = bucket
        self.part_bytes = part_bytes
        self.patience = patience or Patience()
        self._renewed = settings.credentials_dir is not None
        self._trusted = False
        with translated(self.uri(""), settings.endpoint):
            self.client = settings.client()
        self.where = f"the storage at {origin(self.client.meta.endpoint_url)}"

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def trust(self) -> None:
        self._trusted = True

    @contextlib.contextmanager
    def errors(self, key: str, *, optional: bool = False, absent: bool = True) -> Iterator[None]:
        """Turns botocore's errors about `key` into the store's own. `optional`: a call that may well be denied, whatever else is not.
        `absent`: a call of which it may be an answer that there is no such object."""
        try:
            with translated(self.uri(key), self.client.meta.endpoint_url):
                yield
        except StoreError as error:
            # the kubelet brings the files of a renewed Secret up to two minutes later
            if (self._renewed and isinstance(error, Expired)) or (self._trusted and not optional and _is_outage(error, absent)):
                raise Unreachable(self.uri(key), error.message, reason=error.reason) from error
            raise

    def ask(
        self, key: str, call: Callable[[], T], *, limit_s: float | None = None, optional: bool = False, absent: bool = True
    ) -> T:  # fmt: skip
        """The answer of one call of the client about `key`, waited for. `optional` and `absent` as `errors`."""

        def attempt(_: Wait) -> T:
            with _no_conflict(), self.errors(key, optional=optional, absent=absent):
                return call()

        return self._wait_for(attempt, limit_s=limit_s, optional=optional)

    def _wait_for(self, attempt: Callable[[Wait], T], *, limit_s: float | None = None, optional: bool = False) -> T:
        """As `Patience.retry`. A server before the storage may say for a moment that it cannot do what this one could until now."""
        first: float | None = None  # monotonic seconds

        def waiting(wait: Wait) -> T:
            nonlocal first
            try:
                return attempt(wait)
            except Unsupported as error:
                first = first or time.monotonic()
                if optional or not self._trusted or time.monotonic() - first > UNSUPPORTED_S:
                    raise
                raise Unreachable(error.key, error.message, reason="it says that it cannot do that") from error

        return self.patience.retry(self.where, waiting, limit_s=limit_s)

    def head(self, key: str) -> ObjectInfo:
        def look() -> ObjectInfo:
            try:
                answer = self.client.head_object(Bucket=self.bucket, Key=key)
            except botocore.exceptions.ClientError as error:
                if error.response["ResponseMetadata"].get("HTTPStatusCode") == 400:  # why, only an answer with a body says
                    self.client.get_object(Bucket=self.bucket, Key=key, Range="bytes=0-0")["Body"].close()
                raise
            return _info(self.uri(key), key, answer["ContentLength"], answer)

        return self.ask(key, look)

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        if end is not None and end <= start:
            return b""
        received = bytearray()
        version = if_match

        def receive(wait: Wait) -> None:
            nonlocal version
            while (answer := self._read(key, start + len(received), end, version)) is not None:
                length = len(received) + int(answer["ContentLength"])
                try:
                    with contextlib.closing(answer["Body"]) as body:
                        with self.errors(key):
                            tag = tag_of(answer, self.uri(key))
                        version = version or tag  # what is resumed must be the same object
                        if _bare(tag) != _bare(version):
                            raise Precondition(self.uri(key), "the object changed")
                        while piece := body.read(1 << 20):
                            received.extend(piece)
                            wait.progress()
                except _BROKEN_BODY as error:
                    at = start + len(received)
                    raise Unreachable(self.uri(key), f"{self.where} cut its answer at byte {at}", reason="it cut its answer") from error
                except botocore.exceptions.FlexibleChecksumError as error:
                    received.clear()
                    raise Unreachable(self.uri(key), f"{self.where} sent other bytes than it keeps", reason="wrong checksum") from error
                if len(received) >= length:
                    return

        self._wait_for(receive)
        return bytes(received)

    def _read(self, key: str, start: int, end: int | None, if_match: str | None) -> dict[str, Any] | None:
        """One ranged read; None beyond the object's end."""
        wanted: dict[str, str] = {}
        if start or end is not None:
            wanted["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if if_match is not None:
            wanted["IfMatch"] = if_match
        try:
            with _no_conflict(), self.errors(key):
                answer: dict[str, Any] = self.client.get_object(Bucket=self.bucket, Key=key, **wanted)
                if not _is_range(answer, start, end):
                    answer["Body"].close()
                    raise StoreError(self.uri(key), "the server ignores Range headers, so large objects can't be read from it")
                return answer
        except OutOfRange:
            return None

    def put(
        self,
        key: str,
        data: bytes,
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        return self.put_once(key, data, dict(metadata or {}), secrets.token_hex(8), _conditions(if_match, if_none_match))

    def put_once(self, key: str, data: bytes, metadata: dict[str, str], nonce: str, conditions: dict[str, str]) -> ObjectInfo:
        """One write that is known by its nonce, however often it is sent."""

        def write() -> ObjectInfo:
            stamped = metadata | {NONCE: nonce}
            answer = self.client.put_object(Bucket=self.bucket, Key=key, Body=data, Metadata=stamped, **conditions)
            return ObjectInfo(key=key, size=len(data), tag=tag_of(answer, self.uri(key)), metadata=metadata)

        return self.write_once(key, nonce, write, conditions)

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> S3Upload:
        return S3Upload(self, key, dict(metadata or {}))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        more: dict[str, str] = {}
        while True:
            page = self._page(self.client.list_objects_v2, prefix, more)
            for entry in page.get("Contents", []):
                yield ObjectInfo(key=entry["Key"], size=entry["Size"], tag=entry["ETag"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        try:
            self.ask(key, lambda: self.client.delete_object(Bucket=self.bucket, Key=key, **_conditions(if_match, False)), optional=True)
        except NoSuchKey:
            pass
        except Precondition:
            # an absent object is refused too, by some: it is what was asked for, or our own delete whose answer was lost
            with contextlib.suppress(NotFound):
                self.head(key)
                raise

    def sweep(self, prefix: str, older_than_s: float) -> int:
        removed = 0
        more: dict[str, str] = {}
        while True:
            page = self._page(self.client.list_multipart_uploads, prefix, more, optional=True)
            now = server_time(page) or datetime.datetime.now(datetime.UTC)  # the times in it are by the server's clock
            for upload in page.get("Uploads", []):
                # what an emulation lists beyond the prefix is not ours to end
                if upload["Key"].startswith(prefix) and (now - upload["Initiated"]).total_seconds() > older_than_s:
                    self.abort(upload["Key"], upload["UploadId"])
                    removed += 1
            if not page.get("IsTruncated"):
                return removed
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _page(self, listing: Callable[..., Any], prefix: str, more: Mapping[str, str], *, optional: bool = False) -> Any:
        def listed() -> Any:
            page = listing(Bucket=self.bucket, Prefix=prefix, **more)
            if not {"IsTruncated", "Contents", "Uploads"} & page.keys():
                raise StoreError(self.uri(prefix), f"{self.where} answered with something else than a listing; check the endpoint")
            return page

        return self.ask(prefix, listed, optional=optional, absent=False)

    def abort(self, key: str, upload_id: str) -> None:
        """End a multipart upload; no error if there is none."""
        where = {"Bucket": self.bucket, "Key": key, "UploadId": upload_id}
        with contextlib.suppress(NotFound):
            self.ask(key, lambda: self.client.abort_multipart_upload(**where), limit_s=CLEANUP_S, optional=True)

    def write_once(self, key: str, nonce: str, write: Callable[[], ObjectInfo], conditions: Mapping[str, str]) -> ObjectInfo:
        """Carry out one write whose answer may get lost: when it is refused, an object with our nonce is ours."""
        first_conflict: float | None = None  # monotonic seconds

        def attempt(_: Wait) -> ObjectInfo:
            nonlocal first_conflict
            try:
                with self.errors(key):
                    return write()
            except Conflict as error:
                first_conflict = first_conflict or time.monotonic()
                if time.monotonic() - first_conflict < CONFLICT_S:
                    raise Unreachable(self.uri(key), "another write of it is under way", reason="another write is under way") from error
                refused: StoreError = Precondition(self.uri(key), "other writers of this object keep winning")
            except NoSuchKey as error:
                # AWS answers an if_match on an absent key with 404, others with 412
                refused = Precondition(self.uri(key), "the object is gone") if "IfMatch" in conditions else error
            except NoSuchUpload as error:
                refused = Precondition(self.uri(key), "another writer of this object won") if first_conflict else error
            except Precondition as error:
                refused = error
            mine = self._read_back(key, nonce)
            if mine is None:
                if self._trusted and isinstance(refused, NoSuchKey):  # of a write that needs none
                    raise Unreachable(self.uri(key), f"{self.where} refused a write (404)", reason="404") from refused
                raise refused
            return mine

        return self._wait_for(attempt)

    def _read_back(self, key: str, nonce: str) -> ObjectInfo | None:
        """The object, if it is the one that was written with `nonce`. Without an answer there is no telling: that is an error."""
        try:
            with self.errors(key):
                answer = self.client.head_object(Bucket=self.bucket, Key=key)
                info = _info(self.uri(key), key, answer["ContentLength"], answer)
        except (Throttled, Unreachable):
            raise
        except StoreError:
            return None
        return info if answer["Metadata"].get(NONCE) == nonce else None


class S3Upload:
    """Holds back one part. An object that fits into it is written by one plain put."""

    def __init__(self, store: S3Store, key: str, metadata: dict[str, str]) -> None:
        self._store = store
        self._key = key
        self._metadata = metadata
        self._nonce = secrets.token_hex(8)
        self._buffer = bytearray()
        self._size = 0
        self._id: str | None = None
        self._parts: list[dict[str, Any]] = []

    def write(self, data: bytes) -> None:
        self._buffer += data
        self._size += len(data)
        part = self._store.part_bytes
        # strictly more: the last part is sent by complete(), so it is never empty
        while len(self._buffer) > part:
            self._send(bytes(self._buffer[:part]))
            del self._buffer[:part]

    def complete(self, *, if_match: str | None = None, if_none_match: bool = False) -> ObjectInfo:
        store, key, conditions = self._store, self._key, _conditions(if_match, if_none_match)
        if self._id is None:
            return store.put_once(key, bytes(self._buffer), self._metadata, self._nonce, conditions)
        self._send(bytes(self._buffer))
        self._buffer.clear()
        upload_id = self._id

        def finish() -> ObjectInfo:
            answer = store.client.complete_multipart_upload(
                Bucket=store.bucket,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": self._parts},
                **conditions,
            )
            return ObjectInfo(key=key, size=self._size, tag=tag_of(answer, store.uri(key)), metadata=self._metadata)

        with self._begun_anew():
            info = store.write_once(key, self._nonce, finish, conditions)
        self._id = None
        return info

    def abort(self) -> None:
        self._buffer.clear()
        if self._id is None:
            return
        upload_id, self._id = self._id, None
        self._store.abort(self._key, upload_id)

    def _send(self, data: bytes) -> None:
        where: dict[str, str] = {"Bucket": self._store.bucket, "Key": self._key}
        number = len(self._parts) + 1
        if number > MAX_PARTS:
            raise StoreError(self._store.uri(self._key), f"larger than {MAX_PARTS} parts of {self._store.part_bytes} bytes")

        if self._id is None:
            stamped = self._metadata | {NONCE: self._nonce}
            create = self._store.client.create_multipart_upload
            begun = self._store.ask(self._key, lambda: create(**where, Metadata=stamped), absent=False)
            self._id = str(begun["UploadId"])

        def send() -> str:
            answer = self._store.client.upload_part(**where, UploadId=self._id, PartNumber=number, Body=data)
            return tag_of(answer, self._store.uri(self._key))

        with self._begun_anew():
            self._parts.append({"PartNumber": number, "ETag": self._store.ask(self._key, send, absent=False)})

    @contextlib.contextmanager
    def _begun_anew(self) -> Iterator[None]:
        """What the storage has lost of an upload no further try of the same brings back: whoever tries again begins another."""
        try:
            yield
        except NoSuchUpload as error:
            raise Unreachable(error.key, error.message, reason="the upload was lost") from error


def _is_outage(error: StoreError, absent: bool) -> bool:
    """Whether a storage that is in order says so only for a while: keys that are renewed, another server behind its address. `absent`: it
    may say, too, that there is no such object."""
    return isinstance(error, Denied) or type(error) in (StoreError, NotFound) or (isinstance(error, NoSuchKey) and not absent)


def _bare(tag: str) -> str:
    """Proxies make tags weak, and some servers list them without quotes."""
    return tag.removeprefix("W/").strip('"')


def _is_range(answer: Mapping[str, Any], start: int, end: int | None) -> bool:
    """Whether these are the bytes that were asked for, or the first of them."""
    told = str(answer.get("ContentRange", ""))
    if told:
        return told.removeprefix("bytes").lstrip(" =").startswith(f"{start}-")
    return start == 0 and (end is None or int(answer["ContentLength"]) <= end)


@contextlib.contextmanager
def _no_conflict() -> Iterator[None]:
    """Of a call that is no conditional write: the storage is busy with the key, and one may ask again."""
    try:
        yield
    except Conflict as error:
        raise Unreachable(error.key, error.message, reason="another write is under way") from error


def _conditions(if_match: str | None, if_none_match: bool) -> dict[str, str]:
    return ({"IfMatch": if_match} if if_match is not None else {}) | ({"IfNoneMatch": "*"} if if_none_match else {})


def _info(uri: str, key: str, size: int, answer: Mapping[str, Any]) -> ObjectInfo:
    metadata = {name: value for name, value in answer.get("Metadata", {}).items() if name != NONCE}
    return ObjectInfo(key=key, size=size, tag=tag_of(answer, uri), metadata=metadata)
