"""Model folders that were fetched: made by one process for all that share the volume, published whole, checked again, mended.

FOLDER/NAME/                  the model, with its manifest
FOLDER/.NAME.VERSION.part/    what is being fetched; a killed fetch is continued here
FOLDER/.NAME.lease/           whose turn it is
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from banyan_runtime.errors import CacheNotWritable, ConfigError, UnavailableError
from banyan_runtime.hub import manifest
from banyan_runtime.hub.download import Download, Hooks
from banyan_runtime.hub.lease import Claim, Lease, Lost
from banyan_runtime.hub.manifest import Manifest
from banyan_runtime.hub.progress import Report, silent
from banyan_runtime.hub.source import Listing, Source

log = logging.getLogger("banyan")

_FORGOTTEN_S: Final = 24 * 3600.0  # after that nobody continues what was begun
_SCRATCH: Final = re.compile(r"\..+(?:\.part|\.[a-z0-9_]{8})")  # the second is how earlier versions named theirs
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".gguf")
_TOLD: Final = 5  # damaged files named in one line


class Recipe(Protocol):
    """How the files of one version of a model are made."""

    @property
    def title(self) -> str:
        """The address, for people."""

    @property
    def version(self) -> str: ...

    def make(self, folder: Path, names: frozenset[str] | None, hooks: Hooks) -> dict[str, str]:
        """Make these files (None: all) in `folder`, which may hold what a killed attempt left there; returns their sha256 by name.
        It may make more than was asked for."""

    def adopt(self, target: Path) -> Manifest | None:
        """A manifest for a whole folder that was made before there were manifests."""


@dataclass(frozen=True, slots=True)
class Remote:
    """The recipe of a model whose files lie somewhere as they are. The listing is asked for when a file is needed."""

    source: Source
    version: str
    listing: Callable[[], Listing]

    @property
    def title(self) -> str:
        return self.source.title

    def make(self, folder: Path, names: frozenset[str] | None, hooks: Hooks) -> dict[str, str]:
        listing = self.listing()
        wanted = tuple(file for file in listing.files if names is None or file.name in names)
        return Download(self.source, Listing(listing.version, wanted), folder, hooks).run()

    def adopt(self, target: Path) -> Manifest | None:
        return None


def ensure(recipe: Recipe, target: Path, report: Report = silent, *, budget: int | None = manifest.START_BYTES) -> Path:
    """Make `target` hold the recipe's model, whole, and return it. `budget`: as of `manifest.check`.

    Raises ConfigError for a folder that holds something else, CacheNotWritable for one that may not be written, UnavailableError
    when the files cannot be had or the disk is full, ModelError when what came is not what was announced.
    """
    try:
        while _needs(recipe, target, budget) is not None:
            with contextlib.suppress(Lost):
                _bring(recipe, target, report, budget)
    except PermissionError as error:
        raise CacheNotWritable(
            f"{target.parent}: a model cannot be kept there ({error.strerror}); name another folder with --download-dir (BANYAN_CACHE)"
        ) from error
    except OSError as error:
        if error.errno == errno.EROFS:
            raise CacheNotWritable(
                f"{target}: the model has to be fetched or mended, and nothing can be kept there ({error.strerror}); mount the volume for "
                "writing, or name another folder with --download-dir (BANYAN_CACHE)"
            ) from error
        advice = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "; make room, or set BANYAN_CACHE to a folder on another disk: what was fetched is kept and continued"
        raise UnavailableError(f"{target}: the model cannot be kept there ({error.strerror}){advice}") from error
    return target


@dataclass(frozen=True, slots=True)
class _Needs:
    """`names`: files to make; None: all. `kept`: what is said of the others."""

    names: frozenset[str] | None
    kept: Manifest | None = None
    why: str = ""


def _needs(recipe: Recipe, target: Path, budget: int | None) -> _Needs | None:
    """What a folder lacks; None: nothing."""
    found = manifest.read(target)
    if found is None and (adopted := recipe.adopt(target)) is not None:
        log.info("%s: has no manifest, taken as it is", target)
        with contextlib.suppress(OSError):  # a volume that may only be read
            manifest.write(target, adopted)
        return None
    if found is None:
        return _Needs(None)
    if found.version != recipe.version:
        return _Needs(None, why="is of another version" if found.version else "has a damaged manifest")
    findings = manifest.check(target, found, budget)
    if not findings.damaged:
        if findings.current != found:
            with contextlib.suppress(OSError):
                manifest.write(target, findings.current)
        return None
    return _Needs(frozenset(findings.damaged), findings.current, describe(findings.damaged))


def describe(damaged: dict[str, str]) -> str:
    """Damaged files and what is wrong with them, on one line."""
    told = [f"{name} {problem}" for name, problem in sorted(damaged.items())]
    return ", ".join(told[:_TOLD]) + (f" and {len(told) - _TOLD} more are damaged" if len(told) > _TOLD else "")


def _bring(recipe: Recipe, target: Path, report: Report, budget: int | None) -> None:
    """Wait for the lease, look again, and make what lacks."""
    target.parent.mkdir(parents=True, exist_ok=True)

    def waiting(claim: Claim) -> None:
        report("downloading", claim.percent, f"{recipe.title} (fetched by {claim.host or 'another process'})")

    with Lease(target.parent / f".{target.name}.lease", waiting) as lease:
        if (needs := _needs(recipe, target, budget)) is None:
            return
        occupied = target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir())))
        if occupied and manifest.read(target) is None and not (target / "config.json").is_file():
            raise ConfigError(f"{target}: exists and is no whole model; remove it, or name another folder")
        if needs.why:
            log.warning("%s: %s; fetching that again", target, needs.why)
        sweep(target.parent)

        def told(phase: str, percent: int, detail: str) -> None:
            lease.tell(percent)
            report(phase, percent, detail)

        staging = target.parent / f".{target.name}.{recipe.version[:12]}.part"
        staging.mkdir(exist_ok=True)
        try:
            hashes = recipe.make(staging, needs.names, Hooks(lease.check, told))
            made = manifest.of(staging, recipe.title, recipe.version, hashes)
            lease.verify()
            if occupied:
                _mend(target, staging, needs, made)
            else:
                manifest.write(staging, made)
                staging.rename(target)
            manifest.sync(target.parent)
        except FileNotFoundError:
            lease.verify()  # whoever took over while this process stood still has published it
            raise


def _mend(target: Path, staging: Path, needs: _Needs, made: Manifest) -> None:
    """Put what was made anew into a folder that others may be reading: each file by a rename, so they keep what they opened."""
    wanted = needs.names
    if wanted is not None and not wanted <= made.files.keys():
        wanted = None  # this version of ours makes another form of the model: then all of it is new
    names = [name for name in made.files if wanted is None or name in wanted]
    kept = {} if needs.kept is None or wanted is None else needs.kept.files
    files = {name: entry for name, entry in kept.items() if name not in (wanted or ())}
    ours = manifest.read(target) is not None  # else somebody else's weights may lie there
    # First what is to be: should this be cut short, the next start finds what lacks.
    manifest.write(target, Manifest(made.source, made.version, files | {name: made.files[name] for name in names}))
    for name in names:
        (staging / name).replace(target / name)
    if ours and wanted is None:  # weights of another form would be taken for the model's, and nobody vouches for them
        for path in target.iterdir():
            if path.name not in made.files and path.name.endswith(_WEIGHTS):
                path.unlink(missing_ok=True)
    manifest.sync(target)
    shutil.rmtree(staging, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what killed fetches left beside the models and nobody has gone on with for a day."""
    for path in folder.iterdir():
        if not _SCRATCH.fullmatch(path.name) or path.name.endswith(".lease") or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):
            newest = max(each.stat().st_mtime for each in [path, *path.rglob("*")])
            if time.time() - newest > _FORGOTTEN_S:
                log.info("%s: left by a fetch that was killed, removed", path)
                shutil.rmtree(path, ignore_errors=True)
