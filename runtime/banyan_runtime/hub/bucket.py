"""Models in an S3 bucket: the objects of one folder, by the same client and settings as everything else in S3."""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from banyan_runtime.errors import AccessError, ConfigError, ModelError, SourceUnreachable, UnavailableError
from banyan_runtime.hub import cache, manifest
from banyan_runtime.hub.address import BucketPrefix
from banyan_runtime.hub.manifest import Entry
from banyan_runtime.hub.progress import Bar, Report
from banyan_runtime.hub.source import Digest, RemoteFile, needed
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.s3_settings import S3Settings
from banyan_runtime.storage.store import Denied, NotFound, Precondition, StoreError, Throttled, Unreachable

log = logging.getLogger("banyan")

PIECE: Final = 8 << 20
PATIENCE_S: Final = 60.0  # how long the storage may be away
PATIENCE_WITH_COPY_S: Final = 5.0  # and where there is a copy that can be served instead
FILES_AT_ONCE: Final = 8
_MOST_OBJECTS: Final = 32768
_MD5: Final = re.compile(r"[0-9a-f]{32}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def fetch(place: BucketPrefix, home: Path, report: Report, *, into: Path | None = None, hashes: bool = False) -> Path:
    """The folder of the model: `home`/VERSION, or `into`. The version is a hash of the listing. Where the storage does not answer, the
    version that was fetched last is taken.

    Raises ModelError for a folder that is no model or has damaged files, AccessError, ConfigError for wrong settings, SourceUnreachable
    and UnavailableError for a storage that does not answer, and as `cache.ensure`.
    """
    last = _last(into or home, hashes=hashes)
    with _judged():
        patience = Patience(PATIENCE_S if last is None else PATIENCE_WITH_COPY_S, log.warning)
        source = _Folder(S3Store(place.bucket, S3Settings.of(os.environ), patience), place)
    try:
        version, files = source.listing()
    except UnavailableError as error:
        if last is None:
            raise
        log.warning("%s; the version of %s that was fetched before is used (%s)", error, place, last.name[:12])
        return last

    def bring(folder: Path) -> dict[str, Entry]:
        wanted = [replace(file, digest=source.digest(file)) for file in files]
        source.download(wanted, folder, report)
        return manifest.checked(folder, wanted, str(place))

    return cache.ensure(into or home / version, str(place), version, bring, report, hashes=hashes)


def _last(home: Path, *, hashes: bool) -> Path | None:
    """The folder that was fetched last and is whole: `home` itself, or one in it."""
    found = sorted((path.stat().st_mtime, path.parent) for path in [*home.glob(manifest.NAME), *home.glob(f"*/{manifest.NAME}")])
    for _, folder in reversed(found):
        kept = manifest.read(folder)
        if kept is not None and cache.whole(folder, kept.version, hashes=hashes):
            return folder
    return None


class _Folder:
    """The objects of one folder of a bucket. All calls block and raise UserErrors."""

    def __init__(self, store: S3Store, place: BucketPrefix) -> None:
        self._store, self._place = store, place
        self._prefix = f"{place.prefix}/" if place.prefix else ""

    def listing(self) -> tuple[str, list[RemoteFile]]:
        files: list[RemoteFile] = []
        with _judged():
            for count, found in enumerate(self._store.list(self._prefix)):
                if count > _MOST_OBJECTS:
                    raise ModelError(f"{self._place}: holds more than {_MOST_OBJECTS} objects; name the folder of one model")
                name = found.key.removeprefix(self._prefix)
                if "/" not in name:
                    files.append(RemoteFile(name, found.size, found.tag))
        if not files:
            raise ModelError("there are no objects below it; check bucket and prefix", code="model_not_found", value=self._place)
        wanted = needed(files, str(self._place), self._place.gguf)
        text = "\n".join(f"{file.name} {file.size} {file.tag}" for file in wanted)
        return hashlib.sha256(text.encode()).hexdigest()[:40], wanted

    def digest(self, file: RemoteFile) -> Digest | None:
        """From the object's metadata `sha256`, its own SHA-256 checksum, or an ETag that is an MD5: of one part and without KMS."""
        key = self._prefix + file.name
        asked = {"Bucket": self._place.bucket, "Key": key, "IfMatch": file.tag, "ChecksumMode": "ENABLED"}
        with _judged():
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

    def download(self, files: list[RemoteFile], folder: Path, report: Report) -> None:
        """Bring the files that are not in `folder` yet, each by one rename."""
        missing = [file for file in files if not (folder / file.name).is_file() or (folder / file.name).stat().st_size != file.size]
        total = sum(file.size for file in files)
        left = sum(file.size for file in missing)
        cache.make_room(folder, left, str(self._place))
        lock = threading.Lock()
        with Bar(f"Downloading {self._place}", total, unit="B", phase="downloading", report=report) as bar:
            bar.to(total - left)

            def bring(file: RemoteFile) -> None:
                part = folder / f".{file.name}.part"
                with part.open("wb") as written:
                    for start in range(0, file.size, PIECE):
                        with _judged():
                            piece = self._store.get(
                                self._prefix + file.name, start=start, end=min(start + PIECE, file.size), if_match=file.tag
                            )
                        written.write(piece)
                        with lock:
                            bar.advance(len(piece))
                part.replace(folder / file.name)

            with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
                list(pool.map(bring, sorted(missing, key=lambda file: -file.size)))


@contextmanager
def _judged() -> Iterator[None]:
    """Turn the store's errors into ours."""
    try:
        yield
    except (Throttled, Unreachable) as error:
        if isinstance(error, Unreachable) and error.__cause__ is None:
            raise SourceUnreachable(f"{error}; check the network and the endpoint (AWS_ENDPOINT_URL_S3)") from error
        raise UnavailableError(f"{error}; try again later") from error
    except Precondition as error:
        raise UnavailableError(f"{error}; the model was changed while it was fetched: try again when it is whole") from error
    except Denied as error:
        raise AccessError(error.message, code="storage_denied", value=error.key) from error
    except NotFound as error:
        raise ModelError(error.message, code="model_not_found", value=error.key) from error
    except StoreError as error:
        raise ConfigError(error.message, value=error.key) from error
