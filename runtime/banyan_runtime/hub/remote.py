"""Which version of an hf:// or s3:// model is the present one: what the source says, or, when it cannot be asked, the last one here."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

from banyan_runtime.errors import UnavailableError
from banyan_runtime.hub import manifest
from banyan_runtime.hub.address import BucketPrefix, HubRepo
from banyan_runtime.hub.cache import Remote
from banyan_runtime.hub.download import patiently
from banyan_runtime.hub.huggingface import COMMIT, HubSource
from banyan_runtime.hub.progress import Report
from banyan_runtime.hub.source import Listing, Source

log = logging.getLogger("banyan")

ASK_S: Final = 60.0  # how long the question may be tried where nothing is here yet
ASK_WITH_COPY_S: Final = 5.0  # and where there is a copy that can be served instead


def source_of(found: HubRepo | BucketPrefix) -> Source:
    """Raises ConfigError or AccessError for what the environment lacks to ask it."""
    if isinstance(found, HubRepo):
        return HubSource(found, os.environ)
    from banyan_runtime.hub.bucket import BucketSource  # boto3 takes a third of a second to import

    return BucketSource(found, os.environ)


def present(found: HubRepo | BucketPrefix, folder: Callable[[str], Path], home: Path, progress: Report) -> Remote:
    """The recipe of the present version, which is kept in `folder(version)`. A commit that is here is not asked for. `progress` hears
    at once who is waited for, and what to look at should that last.

    Raises UnavailableError where the source does not answer and no version is here, and what `Source.listing` raises.
    """
    source = source_of(found)

    # HF_HUB_OFFLINE is for libraries that would ask by themselves (our own processes set it); an address asks to be asked for.
    def ask(patience_s: float = ASK_S) -> Listing:
        tell(f"waits for {source.asked}; should that last, {source.remedy}")
        return patiently(source.listing, source.remedy, patience_s, tell)

    def tell(words: str) -> None:
        progress("downloading", 0, f"{source.title}: {words}")

    last = found.revision if isinstance(found, HubRepo) and COMMIT.fullmatch(found.revision) else _noted(home, found)
    kept = manifest.read(folder(last)) if last else None
    if kept is None or kept.version != last:
        last = None
    if last is not None and isinstance(found, HubRepo) and last == found.revision:
        return Remote(source, last, ask)
    try:
        listing = ask(ASK_S if last is None else ASK_WITH_COPY_S)
    except UnavailableError as error:
        if last is None:
            raise
        log.warning("%s; the version that was fetched before is used (%s)", error, last[:12])
        return Remote(source, last, ask)
    return Remote(source, listing.version, lambda: listing)


def note_version(home: Path, found: HubRepo | BucketPrefix, version: str) -> None:
    """Remember which version a branch, or a bucket's folder, was last."""
    path = _note(home, found)
    with contextlib.suppress(OSError):  # a volume that may only be read
        if path.is_file() and path.read_text() == version:
            return
        scratch = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        scratch.write_text(version)
        scratch.replace(path)


def _noted(home: Path, found: HubRepo | BucketPrefix) -> str | None:
    try:
        text = _note(home, found).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text if COMMIT.fullmatch(text) else None


def _note(home: Path, found: HubRepo | BucketPrefix) -> Path:
    return home / f".last.{quote(found.revision, safe='') if isinstance(found, HubRepo) else 'listing'}"
