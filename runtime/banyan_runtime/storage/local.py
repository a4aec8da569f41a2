"""Objects as files below one folder: the store of volumes (`pvc://`), of local mode and of a laptop.

Every change is made under one file lock and ends in a rename, so conditional writes hold between the processes of a host
and readers see the old or the new object, never a mixture. Creating is a hard link, which fails on every POSIX file
system (NFS too) if the name exists, so `if_none_match` also holds between hosts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from banyan_runtime.storage.store import Denied, NotFound, ObjectInfo, Precondition, StoreError, Unreachable

LOCK_NAME: Final = ".banyan-lock"
TEMPORARY: Final = ".banyan-tmp"
STALE_SECONDS: Final = 3600  # a temporary file of a writer that died is removed by a later writer of the same object
METADATA_ATTRIBUTE: Final = "user.banyan."


class LocalStore:
    """The files below `root`. Metadata are kept in extended attributes; a file system without them drops metadata."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def uri(self, key: str) -> str:
        return f"file://{self.root.absolute() / key}"

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._errors(key):
            return _info(key, path)

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        path = self._path(key)
        with self._errors(key), path.open("rb") as file:
            if path.is_dir():
                raise NotFound(self.uri(key), "is a folder")
            if if_match is not None and _tag(os.fstat(file.fileno())) != if_match:
                raise Precondition(self.uri(key), "the file changed")
            file.seek(start)
            return file.read() if end is None else file.read(max(0, end - start))

    def put(
        self,
        key: str,
        data: bytes,
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        upload = self.upload(key, metadata=metadata)
        try:
            upload.write(data)
            return upload.complete(if_match=if_match, if_none_match=if_none_match)
        except BaseException:
            upload.abort()
            raise

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> LocalUpload:
        path = self._path(key)
        with self._errors(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(path)
            return LocalUpload(self, key, path, metadata or {})

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        with self._errors(prefix):
            for key in self._walk(folder, prefix):
                # a file may vanish between the listing and the look at it
                with contextlib.suppress(FileNotFoundError):
                    yield _info(key, self.root / key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._errors(key), contextlib.suppress(FileNotFoundError, NotADirectoryError), self.locked():
            path.unlink()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock: between the check of a condition and the write that depends on it nothing changes.

        The lock's file goes with its holder. Who waited for it then holds a file without a name, and takes the lock anew.
        """
        if not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
        path = self.root / LOCK_NAME
        descriptor = _lock(path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)

    def _path(self, key: str) -> Path:
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or ".." in parts:
            raise StoreError(self.uri("") + key, "a key is a relative path without '..'")
        return self.root.joinpath(*parts)

    def _walk(self, folder: str, prefix: str) -> Iterator[str]:
        """Keys below `folder` that begin with `prefix`, in key order ('a.b' before 'a/b', as '.' sorts before '/')."""
        where = self.root / folder
        if not where.is_dir():
            return
        names = sorted(entry.name + "/" if entry.is_dir() else entry.name for entry in os.scandir(where) if not _hidden(entry.name))
        for name in names:
            key = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(key.rstrip("/"), prefix)
            elif key.startswith(prefix):
                yield key

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(self.uri(key), _reason(error)) from error
        except FileExistsError as error:
            raise StoreError(self.uri(key), "there is a file where a folder should be") from error
        except PermissionError as error:
            raise Denied(self.uri(key), _reason(error)) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                raise Denied(self.uri(key), _reason(error)) from error
            raise Unreachable(self.uri(key), _reason(error)) from error


class LocalUpload:
    """Writes into a hidden file beside the target; the file is locked while its writer lives."""

    def __init__(self, store: LocalStore, key: str, path: Path, metadata: Mapping[str, str]) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{TEMPORARY}")
        self._file = self._temporary.open("xb")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        for name, value in metadata.items():
            # metadata help to tell whose an object is; a file system without attributes must not stop the run
            with contextlib.suppress(OSError, AttributeError):
                os.setxattr(self._temporary, METADATA_ATTRIBUTE + name, value.encode())

    def write(self, data: bytes) -> None:
        with self._store._errors(self._key):
            self._file.write(data)

    def complete(self, *, if_match: str | None = None, if_none_match: bool = False) -> ObjectInfo:
        with self._store._errors(self._key):
            self._file.flush()
            # kernel time stamps are coarse (4 ms); a fresh clock reading gives equal sizes different tags
            now = time.time_ns()
            os.utime(self._file.fileno(), ns=(now, now))
            os.fsync(self._file.fileno())
            info = _info(self._key, self._temporary)
            with self._store.locked():
                self._publish(if_match, if_none_match)
            self._file.close()
            _sync_folder(self._path.parent)
            return info

    def _publish(self, if_match: str | None, if_none_match: bool) -> None:
        if if_match is not None and (not self._path.exists() or _tag(self._path.stat()) != if_match):
            raise Precondition(self._store.uri(self._key), "the file changed or is gone")
        if not if_none_match:
            self._temporary.replace(self._path)
            return
        try:
            self._path.hardlink_to(self._temporary)
        except FileExistsError as error:
            raise Precondition(self._store.uri(self._key), "the file exists") from error
        except OSError:
            # no hard links here (SMB, some FUSE): the lock still guards against other processes of this host
            if self._path.exists():
                raise Precondition(self._store.uri(self._key), "the file exists") from None
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink()

    def abort(self) -> None:
        self._file.close()
        with self._store._errors(self._key):
            self._temporary.unlink(missing_ok=True)


def _lock(path: Path) -> int:
    """A descriptor of the file at `path` that is locked for us alone."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _hidden(name: str) -> bool:
    return name == LOCK_NAME or name.endswith(TEMPORARY)


def _tag(stat: os.stat_result) -> str:
    return f"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"


def _info(key: str, path: Path) -> ObjectInfo:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    stat = path.stat()
    metadata: dict[str, str] = {}
    with contextlib.suppress(OSError, AttributeError):
        for name in os.listxattr(path):
            if name.startswith(METADATA_ATTRIBUTE):
                metadata[name.removeprefix(METADATA_ATTRIBUTE)] = os.getxattr(path, name).decode()
    return ObjectInfo(key=key, size=stat.st_size, tag=_tag(stat), metadata=metadata)


def _remove_stale(path: Path) -> None:
    """Remove what writers of this object left that were killed: old, and locked by nobody."""
    for leftover in path.parent.glob(f".{path.name[:100]}.*{TEMPORARY}"):
        with contextlib.suppress(OSError), leftover.open("rb") as file:
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
