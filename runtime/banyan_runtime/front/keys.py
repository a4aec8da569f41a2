"""API keys: those of a file of `name: key` lines that may change at any time, one of the command line, and the server's own."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

import msgspec
from starlette.datastructures import Headers

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.options import flag

LOOK_AGAIN_S: Final = 1.0  # how often the file of keys is looked at
MAX_FILE_BYTES: Final = 1 << 20
MAX_KEYS: Final = 1000  # all of them are compared with each request's (0.2 ms), and each name is a value of a metric's label
_NAMED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._@-]{0,63}):[ \t]+(\S+)")
log = logging.getLogger("banyan")


class ToldKeys(msgspec.Struct, frozen=True):
    """`Keys` on their way to another process of this server: digests with names."""

    fixed: dict[bytes, str]
    read: dict[bytes, str]
    file: str | None
    stamp: tuple[int, int, int] | None

    def __repr__(self) -> str:
        return "ToldKeys(...)"  # it may get into a log


class Keys:
    """The valid keys and whose they are, held as digests. `file` is read again when it changes; a file that went bad keeps the old
    keys."""

    def __init__(self, keys: Iterable[str], file: Path | None, option: str = "--api-keys-file") -> None:
        """Raises ConfigError, which names `option`, when the file cannot be used."""
        self._fixed = {_digest(key): "" for key in keys}
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        self._looked = time.monotonic()
        self._read_keys: dict[bytes, str] = {}
        if file is not None:
            try:
                self._read(file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot be used: {error}", field=option, value=file) from error

    @staticmethod
    def of_users(config: ServerConfig) -> Keys | None:
        """None: no key is asked for. Raises ConfigError."""
        return _keys(config.api_key, config.api_keys_file, "api_keys_file")

    @staticmethod
    def of_admins(config: ServerConfig) -> Keys | None:
        """None: who operates the server is known by its address. Raises ConfigError."""
        return _keys(config.admin_api_key, config.admin_api_keys_file, "admin_api_keys_file")

    def told(self) -> ToldKeys:
        """These keys, for `of_told`. What is no file, such as a pipe, is there for this process alone."""
        return ToldKeys(
            self._fixed, self._read_keys, str(self._file) if self._file is not None and self._file.is_file() else None, self._stamp
        )

    @classmethod
    def of_told(cls, told: ToldKeys) -> Self:
        """As another process has them. The file is read when it has changed since."""
        keys = cls((), None)
        keys._fixed, keys._read_keys, keys._stamp = told.fixed, told.read, told.stamp
        keys._file = None if told.file is None else Path(told.file)
        return keys

    @property
    def names(self) -> set[str]:
        """Of the keys that have one."""
        return {*self._read_keys.values()} - {""}

    def owner(self, key: str) -> str | None:
        """The name of a valid key, "" for one without a name; None: it is not valid. Takes as long for each."""
        self._look()
        given, owner = _digest(key), None
        for known, name in (*self._fixed.items(), *self._read_keys.items()):
            if hmac.compare_digest(known, given):
                owner = name
        return owner

    def _look(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked < LOOK_AGAIN_S:
            return
        self._looked = now
        try:
            if _stamp(self._file) != self._stamp:
                self._read(self._file, waits=False)
                log.info("read %d API keys from %s", len(self._read_keys), self._file)
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read, so the keys stay as they are: %s", self._file, error)

    def _read(self, file: Path, *, waits: bool = True) -> None:
        """`waits`: at the start it may be a pipe, for whose writer everything waits."""
        stamp = _stamp(file)  # before the text: what changes while it is read is read again
        with open(file, "rb", opener=None if waits else _at_once) as source:
            if not waits and not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise ValueError("it is no regular file any more")
            raw = source.read(MAX_FILE_BYTES + 1)
        self._stamp = stamp  # behind it: what could not be opened is tried again
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        self._read_keys = {_digest(key): name for key, name in _parse(raw.decode()).items()}


def _keys(key: str | None, file: str | None, option: str) -> Keys | None:
    if key is None and file is None:
        return None
    return Keys([] if key is None else [key], None if file is None else Path(file), flag(option))


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _parse(text: str) -> dict[str, str]:
    """Names by key: of lines `name: key`, or of a key alone, whose name is "". Raises ValueError, which repeats no key."""
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        named = _NAMED.fullmatch(line)
        name, key = ("", line) if named is None else named.groups()
        if len(key.split()) != 1:
            raise ValueError(f"line {number} is neither a key nor 'name: key' (a name has letters, digits and . _ @ - only, 64 at most)")
        if names.setdefault(key, name) != name:
            raise ValueError(f"line {number} gives a second name to a key")
    if not names:
        raise ValueError("it holds no key (one a line, with or without a name: 'name: key')")
    if len(names) > MAX_KEYS:
        raise ValueError(f"it holds more than {MAX_KEYS} keys")
    return names


class InternalKey:
    """The key of this server's own processes: made anew at every start, never written down, good for what batches ask."""

    def __init__(self, value: str | None = None) -> None:
        """`value`: as it was made by another process of this server."""
        self.value = value or secrets.token_urlsafe(32)
        self._digest = _digest(self.value)

    def valid(self, key: str) -> bool:
        """Takes as long for a wrong key as for a right one."""
        return hmac.compare_digest(_digest(key), self._digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def fingerprint(key: str) -> str:
    """What tells a key from others, like no name of one."""
    return f"key {_digest(key).hex()}"


def presented_key(headers: Headers) -> str | None:
    """The key of a request: Bearer, Anthropic's `x-api-key`, or Azure's `api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or headers.get("api-key")
