"""Finding a custom_id that occurs twice, in a file of any length, with 8 bytes a line.

A first pass keeps a keyed 64-bit hash of every id; sorted, equal neighbours are suspects. The second pass, which has the
ids themselves, keeps full digests of the suspects only. So a hash collision costs a few bytes, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_LINES: Final = 32_000_000  # 256 MB of hashes; beyond, duplicates go unnoticed and the run says so


class IdCensus:
    """The first pass."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._key = secrets.token_bytes(16)  # keyed: nobody can prepare a file of collisions
        self._hashes = array("Q")
        self._max_lines = max_lines
        self.complete = True  # False once the file was too long to remember

    def add(self, custom_id: str) -> None:
        if len(self._hashes) >= self._max_lines:
            self.complete = False
            return
        self._hashes.append(_short(self._key, custom_id))

    def suspects(self) -> Suspects:
        """What the second pass must look at. The census is used up."""
        hashes = np.frombuffer(self._hashes, dtype=np.uint64).copy()
        del self._hashes[:]
        hashes.sort()
        repeated = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        return Suspects(self._key, repeated)


class Suspects:
    """The second pass: ask `seen_before` once for every id, in file order."""

    def __init__(self, key: bytes, hashes: npt.NDArray[np.uint64]) -> None:
        self._key = key
        self._hashes = hashes
        self._seen: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def again(self) -> Suspects:
        """The same suspects for another pass over the file."""
        return Suspects(self._key, self._hashes)

    def seen_before(self, custom_id: str) -> bool:
        """Whether this id was asked for already (only suspects can have been)."""
        if not len(self._hashes):
            return False
        short = np.uint64(_short(self._key, custom_id))
        place = int(np.searchsorted(self._hashes, short))
        if place == len(self._hashes) or self._hashes[place] != short:
            return False
        digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16, key=self._key).digest()
        known = digest in self._seen
        self._seen.add(digest)
        return known


def _short(key: bytes, custom_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8, key=key).digest(), "little")
