"""Objects in an S3 bucket through boto3, made safe where S3 over a real network is not.

Three gaps of the client are closed here. A body cut half-way is resumed with a ranged, conditional read. A conditional
write whose answer was lost would see its own object and report a conflict, so every write carries a nonce as metadata
and is read back in doubt. And checksum trailers, which many S3-compatible servers store as if they were data, are only
used with AWS itself.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import boto3
import botocore.config
import botocore.exceptions

from banyan_runtime.storage.store import Denied, NotFound, ObjectInfo, Precondition, StoreError, Throttled, Unreachable

PART_BYTES: Final = 16 << 20  # all parts but the last are equal (R2 asks for it); 10,000 of them hold 160 GB
MAX_PARTS: Final = 10_000
READ_ATTEMPTS: Final = 10  # tries to resume one body without a single new byte
CONFLICT_ATTEMPTS: Final = 5  # 409: another conditional write of the same key is under way
NONCE: Final = "banyan-write"
PATIENCE_S: Final = 120.0  # how long an upload that has begun waits for a storage that is away

_THROTTLED: Final = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_DENIED: Final = {
    "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "RequestTimeTooSkewed",
    "AllAccessDisabled", "AccountProblem", "TokenRefreshRequired",
}  # fmt: skip
_BROKEN_BODY: Final = (
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ResponseStreamingError,
    botocore.exceptions.ReadTimeoutError,
    botocore.exceptions.ConnectionClosedError,
)


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How to reach S3. Credentials given here win over boto3's own chain."""

    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    threads: int = 16

    @staticmethod
    def of(environment: Mapping[str, str]) -> S3Settings:
        """From AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION, BANYAN_S3_FORCE_PATH_STYLE and the files
        of BANYAN_S3_CREDENTIALS_DIR. Raises Denied if that folder lacks a key.
        """
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None
        forced = environment.get("BANYAN_S3_FORCE_PATH_STYLE", "").lower()
        folder = environment.get("BANYAN_S3_CREDENTIALS_DIR") or None
        return S3Settings(
            endpoint=endpoint,
            region=region or ("us-east-1" if endpoint else None),  # signing needs one; most servers take this
            path_style=forced in ("1", "true", "yes") or (endpoint is not None and forced not in ("0", "false", "no")),
            access_key=folder and _secret(folder, "AWS_ACCESS_KEY_ID"),
            secret_key=folder and _secret(folder, "AWS_SECRET_ACCESS_KEY"),
            session_token=folder and _secret(folder, "AWS_SESSION_TOKEN", required=False),
        )

    def client(self) -> Any:
        """A boto3 client; safe to share between threads."""
        checksums: Any = {}
        if self.endpoint is not None:
            checksums = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
        config = botocore.config.Config(
            connect_timeout=5,
            read_timeout=60,
            retries={"mode": "standard", "total_max_attempts": 8},
            max_pool_connections=self.threads + 4,
            s3={"addressing_style": "path" if self.path_style else "auto"},
            **checksums,
        )
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            aws_session_token=self.session_token,
            config=config,
        )


def _secret(folder: str, name: str, *, required: bool = True) -> str | None:
    path = Path(folder) / name
    value = path.read_text().strip() if path.is_file() else ""
    if not value and required:
        raise Denied(str(path), "the file is missing or empty; the S3 credentials Secret needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return value or None


class S3Store:
    """The objects of one bucket."""

    def __init__(self, bucket: str, settings: S3Settings, *, part_bytes: int = PART_BYTES) -> None:
        self.bucket = bucket
        self.part_bytes = part_bytes
        with _errors(self.uri(""), settings.endpoint):
            self.client = settings.client()

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def errors(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Turns botocore's errors about `key` into the store's own."""
        return _errors(self.uri(key), self.client.meta.endpoint_url)

    def head(self, key: str) -> ObjectInfo:
        with self.errors(key):
            answer = self.client.head_object(Bucket=self.bucket, Key=key)
        return _info(key, answer["ContentLength"], answer)

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        if end is not None and end <= start:
            return b""
        received = bytearray()
        length: int | None = None  # of the whole range, as the first answer said
        failures = 0
        while length is None or len(received) < length:
            before = len(received)
            try:
                answer = self._read(key, start + before, end, if_match)
                if answer is None:
                    break
                length = before + int(answer["ContentLength"])
                if_match = if_match or answer["ETag"]  # what is resumed must be the same object
                with contextlib.closing(answer["Body"]) as body:
                    while piece := body.read(1 << 20):
                        received += piece
            except _BROKEN_BODY as error:
                failures = 0 if len(received) > before else failures + 1
                if failures >= READ_ATTEMPTS:
                    raise Unreachable(self.uri(key), f"the answer was cut {failures} times at byte {start + len(received)}") from error
                time.sleep(min(0.05 * 2**failures, 5.0))
        return bytes(received)

    def _read(self, key: str, start: int, end: int | None, if_match: str | None) -> dict[str, Any] | None:
        """One ranged read; None beyond the object's end."""
        wanted: dict[str, str] = {}
        if start or end is not None:
            wanted["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if if_match is not None:
            wanted["IfMatch"] = if_match
        try:
            with self.errors(key):
                answer: dict[str, Any] = self.client.get_object(Bucket=self.bucket, Key=key, **wanted)
        except _OutOfRange:
            return None
        if start and "ContentRange" not in answer:
            answer["Body"].close()
            raise StoreError(self.uri(key), "the server ignores Range headers, so large objects can't be read from it")
        return answer

    def put(
        self,
        key: str,
        data: bytes,
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        nonce = secrets.token_hex(8)
        given = dict(metadata or {})

        def write() -> ObjectInfo:
            answer = self.client.put_object(
                Bucket=self.bucket, Key=key, Body=data, Metadata=given | {NONCE: nonce}, **_conditions(if_match, if_none_match)
            )
            return ObjectInfo(key=key, size=len(data), tag=answer["ETag"], metadata=given)

        return self._write_once(key, nonce, write, conditional=if_match is not None or if_none_match)

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> S3Upload:
        return S3Upload(self, key, dict(metadata or {}))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        more: dict[str, str] = {}
        while True:
            with self.errors(prefix):
                page = self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **more)
            for entry in page.get("Contents", []):
                yield ObjectInfo(key=entry["Key"], size=entry["Size"], tag=entry["ETag"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        try:
            with self.errors(key):
                self.client.delete_object(Bucket=self.bucket, Key=key)
        except _NoSuchKey:
            pass

    def _write_once(self, key: str, nonce: str, write: Callable[[], ObjectInfo], *, conditional: bool) -> ObjectInfo:
        """Carry out one write whose answer may get lost: in doubt, an object with our nonce is ours."""
        for attempt in range(CONFLICT_ATTEMPTS):
            try:
                with self.errors(key):
                    return write()
            except _Conflict:
                time.sleep(0.1 * 2**attempt)
            except _NoSuchKey as error:
                if (mine := self._read_back(key, nonce)) is not None:
                    return mine
                if conditional:  # AWS answers an if_match on an absent key with 404, others with 412
                    raise Precondition(self.uri(key), "the object is gone") from error
                raise
            except (Precondition, Unreachable):
                if (mine := self._read_back(key, nonce)) is not None:
                    return mine
                raise
        raise Precondition(self.uri(key), "other writers of this object keep winning")

    def _read_back(self, key: str, nonce: str) -> ObjectInfo | None:
        try:
            with self.errors(key):
                answer = self.client.head_object(Bucket=self.bucket, Key=key)
        except StoreError:
            return None
        return _info(key, answer["ContentLength"], answer) if answer["Metadata"].get(NONCE) == nonce else None


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
        store, key = self._store, self._key
        if self._id is None:
            data = bytes(self._buffer)
            return _patiently(lambda: store.put(key, data, if_match=if_match, if_none_match=if_none_match, metadata=self._metadata))
        self._send(bytes(self._buffer))
        self._buffer.clear()
        upload_id = self._id

        def finish() -> ObjectInfo:
            answer = store.client.complete_multipart_upload(
                Bucket=store.bucket,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": self._parts},
                **_conditions(if_match, if_none_match),
            )
            return ObjectInfo(key=key, size=self._size, tag=answer["ETag"], metadata=self._metadata)

        conditional = if_match is not None or if_none_match
        info = _patiently(lambda: store._write_once(key, self._nonce, finish, conditional=conditional))
        self._id = None
        return info

    def abort(self) -> None:
        self._buffer.clear()
        if self._id is None:
            return
        upload_id, self._id = self._id, None
        with contextlib.suppress(NotFound), self._store.errors(self._key):
            self._store.client.abort_multipart_upload(Bucket=self._store.bucket, Key=self._key, UploadId=upload_id)

    def _send(self, data: bytes) -> None:
        where: dict[str, str] = {"Bucket": self._store.bucket, "Key": self._key}
        number = len(self._parts) + 1
        if number > MAX_PARTS:
            raise StoreError(self._store.uri(self._key), f"larger than {MAX_PARTS} parts of {self._store.part_bytes} bytes")

        def send() -> str:
            with self._store.errors(self._key):
                if self._id is None:
                    begun = self._store.client.create_multipart_upload(**where, Metadata=self._metadata | {NONCE: self._nonce})
                    self._id = begun["UploadId"]
                answer = self._store.client.upload_part(**where, UploadId=self._id, PartNumber=number, Body=data)
            return str(answer["ETag"])

        self._parts.append({"PartNumber": number, "ETag": _patiently(send)})


T = TypeVar("T")


def _patiently(call: Callable[[], T]) -> T:
    """Hours of work may hang on an upload: beyond the client's own retries, wait for the storage to come back."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (Throttled, Unreachable):
            if time.monotonic() > deadline:
                raise
            time.sleep(2.0)


class _OutOfRange(StoreError):
    """The range begins at or behind the object's end."""


class _NoSuchKey(NotFound):
    """The bucket is there, the object (or the upload) is not."""


class _Conflict(StoreError):
    """409: another conditional write of the key was under way; the answer says nothing about ours."""


def _conditions(if_match: str | None, if_none_match: bool) -> dict[str, str]:
    return ({"IfMatch": if_match} if if_match is not None else {}) | ({"IfNoneMatch": "*"} if if_none_match else {})


def _info(key: str, size: int, answer: Mapping[str, Any]) -> ObjectInfo:
    metadata = {name: value for name, value in answer.get("Metadata", {}).items() if name != NONCE}
    return ObjectInfo(key=key, size=size, tag=answer["ETag"], metadata=metadata)


@contextlib.contextmanager
def _errors(uri: str, endpoint: str | None) -> Iterator[None]:
    """Turn botocore's errors into the store's own, which say where the storage is and what it, or the network, said."""
    storage = f"the storage at {_origin(endpoint)}" if endpoint else "the storage"
    try:
        yield
    except botocore.exceptions.ClientError as error:
        _raise(uri, storage, error)
    except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError) as error:
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        secret = "name a Secret with them in spec.s3.credentialsSecretRef (in local mode given with --secret NAME=DIR)"
        raise Denied(uri, f"no S3 credentials found; set {keys}, or for a BatchJob {secret}") from error
    except botocore.exceptions.ParamValidationError as error:
        raise StoreError(uri, f"not a valid bucket or key ({str(error).splitlines()[-1].strip()})") from error
    except (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError) as error:
        raise Unreachable(uri, f"{storage} did not answer ({_cause(error)})") from error
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise StoreError(uri, f"{storage} is set up wrongly ({error})") from error


def _origin(endpoint: str) -> str:
    """Scheme, host and port alone: a URL can carry a password."""
    return re.sub(r"^([a-z]+://)?(?:[^/@]*@)?([^/?#]*).*$", r"\1\2", endpoint, flags=re.IGNORECASE | re.DOTALL)


def _cause(error: BaseException) -> str:
    """What the network said below all that wrapped it: refused, no such host, a certificate."""
    first = error
    while (below := first.__cause__ or first.__context__) is not None:
        first = below
    name = type(error).__name__
    return f"{name}: {first}" if str(first) and first is not error else name


def _raise(uri: str, storage: str, error: botocore.exceptions.ClientError) -> NoReturn:
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(error.response.get("Error", {}).get("Code", ""))  # HEAD has no body: then it is the status
    message = str(error.response.get("Error", {}).get("Message", "")).strip().rstrip(".")
    said = f"{status} {code}".strip() + (f": {message}" if message and message != code else "")
    date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "unknown")
    if code == "NoSuchBucket":
        raise NotFound(uri, f"there is no such bucket in {storage}") from error
    if code == "RequestTimeTooSkewed":
        raise Denied(uri, f"this machine's clock is wrong: that of {storage} says {date}") from error
    if code in _THROTTLED or status == 429:
        raise Throttled(uri, f"{storage} asks for fewer requests ({said})") from error
    if code in _DENIED or status in (401, 403):
        raise Denied(uri, f"access denied by {storage} ({said}); check the credentials and the bucket's policy") from error
    if status in (301, 307, 308) or code == "AuthorizationHeaderMalformed":
        region = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", "another one")
        raise StoreError(uri, f"the bucket is in another region ({region}); set AWS_REGION") from error
    if status == 404:
        raise _NoSuchKey(uri, "there is no such object") from error
    if status == 409:
        raise _Conflict(uri, f"another write is under way ({said})") from error
    if status == 412:
        raise Precondition(uri, "the object changed, or exists already") from error
    if status == 416:
        raise _OutOfRange(uri, "beyond the object's end") from error
    if status >= 500:
        raise (Throttled if status == 503 and code == "SlowDown" else Unreachable)(uri, f"{storage} failed ({said})") from error
    raise StoreError(uri, f"{storage} refused ({said})") from error
