"""Models in an S3 bucket: the objects of one folder, by the same client and settings as everything else in S3."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from banyan_runtime.errors import AccessError, ConfigError, ModelError, UnavailableError
from banyan_runtime.hub.address import BucketPrefix
from banyan_runtime.hub.source import MOST_FILES, Digest, Interrupted, Listing, RemoteFile, needed
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.s3_settings import S3Settings
from banyan_runtime.storage.store import Denied, NotFound, Precondition, StoreError, Throttled, Unreachable

PIECE: Final = 8 << 20  # a request's cost is small beside it, and a kill repeats at most this much of each file
_PATIENCE_S: Final = 2.0  # enough to go on with a piece that was cut; how long to wait is decided by whoever fetches
_MD5: Final = re.compile(r"[0-9a-f]{32}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class BucketSource:
    """A `Source`. Endpoint and credentials are those of `S3Settings.of`."""

    def __init__(self, place: BucketPrefix, environment: Mapping[str, str]) -> None:
        self._place = place
        self._folder = f"{place.prefix}/" if place.prefix else ""
        with self._judged():
            self._store = S3Store(place.bucket, S3Settings.of(environment), Patience(_PATIENCE_S))

    @property
    def title(self) -> str:
        return str(self._place)

    @property
    def asked(self) -> str:
        return self._store.where

    @property
    def remedy(self) -> str:
        return "check the network and the endpoint (AWS_ENDPOINT_URL_S3)"

    def listing(self) -> Listing:
        files: list[RemoteFile] = []
        with self._judged():
            for count, found in enumerate(self._store.list(self._folder)):
                if count > 8 * MOST_FILES:
                    raise ModelError(f"{self.title}: holds more than {count} objects; name the folder of one model")
                name = found.key.removeprefix(self._folder)
                if "/" not in name:
                    files.append(RemoteFile(name, found.size, found.tag))
        if not files:
            raise ModelError(f"{self.title}: there are no objects below it; check bucket and prefix")
        wanted = needed(files, self.title)
        text = "\n".join(f"{file.name} {file.size} {file.tag}" for file in wanted)
        return Listing(hashlib.sha256(text.encode()).hexdigest()[:40], wanted)

    def digest(self, file: RemoteFile) -> Digest | None:
        """From the object's metadata `sha256`, its own SHA-256 checksum, or an ETag that is an MD5: of one part and without KMS."""
        key = self._folder + file.name
        asked = {"Bucket": self._place.bucket, "Key": key, "IfMatch": file.tag, "ChecksumMode": "ENABLED"}
        with self._judged():
            answer: dict[str, Any] = self._store.ask(key, lambda: self._store.client.head_object(**asked))
        named = str(answer.get("Metadata", {}).get("sha256", "")).lower()
        if _SHA256.fullmatch(named):
            return Digest("sha256", named)
        try:
            checksum = base64.b64decode(answer.get("ChecksumSHA256", ""), validate=True)  # that of an object of several parts ends in -N
        except binascii.Error:
            checksum = b""
        if len(checksum) == 32:
            return Digest("sha256", checksum.hex())
        tag = file.tag.strip('"')
        encrypted = answer.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in answer
        return Digest("md5", tag) if _MD5.fullmatch(tag) and not encrypted else None

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        key = self._folder + file.name
        while start < file.size:
            with self._judged():
                piece = self._store.get(key, start=start, end=min(start + PIECE, file.size), if_match=file.tag)
            if not piece:
                return
            yield piece
            start += len(piece)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Turn what the store says into what another try may mend, and what the user must."""
        try:
            yield
        except (Throttled, Unreachable) as error:
            raise Interrupted(str(error), unanswered=isinstance(error, Unreachable) and error.__cause__ is None) from error
        except Precondition as error:
            raise UnavailableError(f"{error}; the model was changed while it was fetched: try again when it is whole") from error
        except Denied as error:
            raise AccessError(str(error)) from error
        except NotFound as error:
            raise ModelError(str(error)) from error
        except StoreError as error:
            raise ConfigError(str(error)) from error
