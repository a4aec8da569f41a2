"""Objects as files below one folder: the store of volumes (`pvc://`), of local mode and of a laptop.

A disk that is full fails the write that met it, at once, and what that write left is removed: room is needed by others.

Every change is made under one file lock and ends in a rename, so conditional writes hold between the processes of a host
and readers see the old or the new object, never a mixture. Creating is a hard link, which fails on every POSIX file
system (NFS too) if the name exists, so `if_none_match` also holds between hosts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat as stat_of
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote

from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import Denied, Full, NotFound, ObjectInfo, Precondition, StoreError, Unreachable

LOCK_NAME: Final = ".banyan-lock"
TEMPORARY: Final = ".banyan-tmp"
_PLAIN: Final = "/!$&'()*+,:;=@~"  # stands for itself in a path of a URI
STALE_SECONDS: Final = 3600  # a temporary file of a writer that died is removed by a later writer of the same folder
METADATA_ATTRIBUTE: Final = "user.banyan."

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL, errno.EXDEV)


class LocalStore:
    """The files below `root`. Metadata are kept in extended attributes: a file system without them drops metadata, and nothing else.

    Nothing is tried twice: a disk gives the same answer again, and after a failed fsync nobody can say what it holds. `patience`
    only tells of calls that take long, as on a network volume whose server is away.
    """

    def __init__(self, root: Path, patience: Patience | None = None) -> None:
        self.root = root
        self.where = f"the folder {root.absolute()}"  # its name in notices
        self._patience = patience or Patience()
        self._sweeping = threading.Lock()
        self._swept: dict[Path, float] = {}  # folders written to, and when they were last searched for leftovers

    def uri(self, key: str) -> str:
        # what `open_uri` undoes; names need not be UTF-8
        return "file://" + quote(os.fsencode(self.root.absolute() / key), safe=_PLAIN)

    def trust(self) -> None:
        """A folder says what is so."""

    def head(self, key: str) -> ObjectInfo:
        path = self.path(key)
        with self.errors(key), _dangling(path):
            return _info(key, path)

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        path = self.path(key)
        with self.errors(key), _dangling(path), path.open("rb") as file:
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
            with contextlib.suppress(StoreError):
                upload.abort()
            raise

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> LocalUpload:
        path = self.path(key)
        with self.errors(key):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except NotADirectoryError as error:
                raise FileExistsError(error.errno, error.strerror, error.filename) from error
            self._sweep_sometimes(path.parent)
            return LocalUpload(self, key, path, metadata or {})

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        found: list[ObjectInfo] = []
        with self.errors(prefix):
            for key in self._walk(folder, prefix):
                # a file may vanish between the listing and the look at it; what is none is no object
                with contextlib.suppress(FileNotFoundError, _NoFile):
                    found.append(_info(key, self.root / key))
        yield from found

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        path = self.path(key)
        with self.errors(key), contextlib.suppress(FileNotFoundError, NotADirectoryError), self.locked():
            if if_match is not None and _tag(path.stat()) != if_match:
                raise Precondition(self.uri(key), "the file changed")
            path.unlink()

    def sweep(self, prefix: str, older_than_s: float) -> int:
        top, _, begin = prefix.rpartition("/")
        where = self.path(top) if top else self.root
        removed = 0
        with self.errors(prefix):
            for folder, below, _ in os.walk(where):
                if Path(folder) == where:
                    removed += _remove_stale(where, older_than_s, begin)
                    below[:] = [name for name in below if name.startswith(begin)]
                else:
                    removed += _remove_stale(Path(folder), older_than_s)
        return removed

    def sync(self, key: str) -> None:
        """Make durable what somebody has written of an object that is not written whole, as a journal."""
        with self.errors(key), self.path(key).open("rb") as file:
            os.fsync(file.fileno())

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

    def path(self, key: str) -> Path:
        """Where the object lies: for files that are not written whole, such as journals. StoreError for a key that leaves the folder."""
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or ".." in parts:
            raise StoreError(self.uri("") + key, "a key is a relative path without '..'")
        return self.root.absolute().joinpath(*parts)

    def _sweep_sometimes(self, folder: Path) -> None:
        now = time.monotonic()
        with self._sweeping:
            due = now - self._swept.get(folder, -STALE_SECONDS) >= STALE_SECONDS
            if due:
                self._swept[folder] = now
        if due:
            _remove_stale(folder, STALE_SECONDS)

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
    def errors(self, key: str) -> Iterator[None]:
        with self._patience.watch(self.where):
            try:
                yield
            except OSError as error:
                raise self._typed(key, error) from error

    def _typed(self, key: str, error: OSError) -> StoreError:
        uri, reason = self.uri(key), (error.strerror or str(error)).lower()
        if isinstance(error, _Dangling):
            return StoreError(uri, f"{error.strerror}; remove it, or let it lead to a file")
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return NotFound(uri, reason)
        if isinstance(error, IsADirectoryError):
            return StoreError(uri, "there is a folder where a file should be")
        if isinstance(error, FileExistsError):
            return StoreError(uri, "there is a file where a folder should be")
        if isinstance(error, PermissionError):
            remedy = f"user {os.geteuid()} needs read access to what is read and write access to where results go (fsGroup, or chmod)"
            return Denied(uri, f"{reason}; {remedy}", reason=reason)
        if error.errno == errno.EROFS:
            return Denied(uri, reason)
        if isinstance(error, _NoFile):
            return StoreError(uri, f"{error.strerror}; write what comes from it into a file, and give that")
        if error.errno in _NO_DESCRIPTORS:
            return Unreachable(uri, f"{reason}; raise the limit (`ulimit -n`)", reason=reason)
        if error.errno == errno.ENAMETOOLONG:
            return StoreError(uri, reason)
        if error.errno == errno.EFBIG:
            return StoreError(uri, f"{reason} for this file system, or for the limit of this process (`ulimit -f`); raise it")
        if error.errno in _FULL:
            return Full(uri, f"{reason}: {self._room(key)}; make room there, or choose another folder", reason=reason)
        return Unreachable(uri, reason)

    def _room(self, key: str) -> str:
        """How much is free where `key` lies. Of a quota nothing is known here."""
        folder = self.path(key).parent if key else self.root.absolute()
        while not folder.exists():
            folder = folder.parent
        try:
            free = shutil.disk_usage(folder).free
        except OSError:
            return f"the disk of {folder}"
        return f"{free / 1e6:.1f} MB are free on the disk of {folder}"


class LocalUpload:
    """Writes into a hidden file beside the target; the file is locked while its writer lives."""

    def __init__(self, store: LocalStore, key: str, path: Path, metadata: Mapping[str, str]) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{TEMPORARY}")
        self._info: ObjectInfo | None = None  # once the file is whole and safe on the disk
        self._failure: StoreError | None = None
        # unbuffered: what a buffer holds fails when it is closed, long after the write
        self._file = self._temporary.open("xb", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError:
            self._drop()
            raise
        for name, value in metadata.items():
            # metadata help to tell whose an object is; a file system without attributes must not stop the run
            with contextlib.suppress(OSError, AttributeError):
                os.setxattr(self._temporary, METADATA_ATTRIBUTE + name, value.encode())

    def write(self, data: bytes) -> None:
        with self._failing():
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]

    def complete(self, *, if_match: str | None = None, if_none_match: bool = False) -> ObjectInfo:
        info = self._seal()
        with self._store.errors(self._key):
            with self._store.locked():
                self._publish(if_match, if_none_match)
            sync_folder(self._path.parent)
        return info

    def _seal(self) -> ObjectInfo:
        """Have the disk say that it holds all, before anybody sees it."""
        if self._info is None:
            with self._failing():
                # kernel time stamps are coarse (4 ms); a fresh clock reading gives equal sizes different tags
                now = time.time_ns()
                os.utime(self._file.fileno(), ns=(now, now))
                os.fsync(self._file.fileno())
                info = _info(self._key, self._temporary)
                self._file.close()
                self._info = info
        assert self._info is not None
        return self._info

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """After a failed write, fsync or close nobody knows what the file holds: it goes at once, and the upload with it."""
        if self._failure is not None:
            raise self._failure
        try:
            with self._store.errors(self._key):
                yield
        except StoreError as error:
            self._failure = error
            self._drop()
            raise

    def _drop(self) -> None:
        for step in (self._file.close, self._temporary.unlink):
            with contextlib.suppress(OSError):
                step()

    def _publish(self, if_match: str | None, if_none_match: bool) -> None:
        if if_match is not None and (not self._path.exists() or _tag(self._path.stat()) != if_match):
            raise Precondition(self._store.uri(self._key), "the file changed or is gone")
        if not if_none_match:
            self._temporary.replace(self._path)
            return
        try:
            self._path.hardlink_to(self._temporary)
        except FileExistsError as error:
            _check_file(self._path)
            # a network volume whose answer was lost refuses its own link the second time
            if not self._path.exists() or not self._path.samefile(self._temporary):
                raise Precondition(self._store.uri(self._key), "the file exists") from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # no hard links here (SMB, some FUSE): the lock still guards against other processes of this host
            if os.path.lexists(self._path):
                _check_file(self._path)
                raise Precondition(self._store.uri(self._key), "the file exists") from None
            self._temporary.replace(self._path)
            return
        self._temporary.unlink()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with self._store.errors(self._key):
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


class _Dangling(OSError):
    """A link that leads nowhere: a name that is taken, though there is no object."""


class _NoFile(OSError):
    """A pipe, a socket or a device: nothing that could be read twice."""


@contextlib.contextmanager
def _dangling(path: Path) -> Iterator[None]:
    """Tell a file that is not there from a link that leads nowhere."""
    try:
        yield
    except FileNotFoundError as error:
        if path.is_symlink():
            raise _Dangling(error.errno, f"there is a link to {path.readlink()}, which does not exist") from error
        raise


def _check_file(path: Path) -> None:
    """Raise if what bears the name is no file, so no object that another writer made."""
    with contextlib.suppress(FileNotFoundError), _dangling(path):
        _info("", path)


def _hidden(name: str) -> bool:
    return name == LOCK_NAME or name.endswith(TEMPORARY)


def _tag(stat: os.stat_result) -> str:
    return f"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"


def _info(key: str, path: Path) -> ObjectInfo:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    stat = path.stat()
    if not stat_of.S_ISREG(stat.st_mode):
        raise _NoFile(errno.EINVAL, "this is no regular file, and has no size (a pipe or a device)", str(path))
    metadata: dict[str, str] = {}
    with contextlib.suppress(OSError, AttributeError):
        for name in os.listxattr(path):
            if name.startswith(METADATA_ATTRIBUTE):
                metadata[name.removeprefix(METADATA_ATTRIBUTE)] = os.getxattr(path, name).decode()
    return ObjectInfo(key=key, size=stat.st_size, tag=_tag(stat), metadata=metadata)


def _remove_stale(folder: Path, older_than_s: float, begin: str = "") -> int:
    """Remove temporary files, of objects whose name begins with `begin`, whose writers were killed: old, and locked by nobody."""
    removed = 0
    for leftover in folder.glob(f".{glob.escape(begin)}*{TEMPORARY}"):
        with contextlib.suppress(OSError), leftover.open("rb") as file:
            if time.time() - leftover.stat().st_mtime > older_than_s:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
                removed += 1
    return removed


def sync_folder(folder: Path) -> None:
    """Make a new name in it durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
