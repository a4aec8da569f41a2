"""A local folder of files, batches and responses that may vanish while it is used: removed, or no longer mounted.

What lies in its place then, nothing or an empty mount point, must not be taken for a storage without files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import NotFound, Unreachable

MARK: Final = ".banyan-storage"


class Gone(Unreachable):
    """The folder is not the one that it was."""


class HomeStore(LocalStore):
    """The files below a folder that bears our mark; every call fails with Gone while it does not."""

    def __init__(self, root: Path, patience: Patience | None = None) -> None:
        super().__init__(root, patience)
        self._mark = root.absolute() / MARK

    @contextlib.contextmanager
    def errors(self, key: str) -> Iterator[None]:
        self.check()
        try:
            with super().errors(key):
                yield
        except NotFound:
            self.check()
            raise
        self.check()  # a listing of what vanished meanwhile is not the whole

    def check(self) -> None:
        """Raises Gone."""
        if not self._mark.exists():
            reason = f"the folder, or {MARK} in it, has gone: it was removed, or is not mounted; bring it back, or start the server again"
            raise Gone(self.uri(""), reason)


def make_home(folder: Path) -> None:
    """Make the folder, if it is not there, and leave our mark. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / MARK).touch(0o600)
