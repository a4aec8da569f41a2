"""The library for this processor: the fastest variant that can be had and that computes rightly here."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from banyan_runtime.hub.resolve import cache_dir
from banyan_runtime.model import host
from banyan_runtime.model.native import build, variants
from banyan_runtime.model.native.library import Library
from banyan_runtime.model.native.variants import Variant

log = logging.getLogger("banyan")


def load() -> Library:
    """Raises NotBuilt where no variant can be had, ConfigError where $BANYAN_NATIVE_VARIANT names one that cannot run here."""
    cache: Path | None = None
    with contextlib.suppress(RuntimeError):  # of who has no home; a library that the package brings along needs none
        cache = cache_dir() / "native"
    return load_from(variants.choose(host.instruction_sets()), cache)


def load_from(candidates: list[Variant], cache: Path | None) -> Library:
    """The library of the first of `candidates` that can be had."""
    reasons = []
    for variant in candidates:
        try:
            library = _variant(variant, cache)
        except build.NotBuilt as error:
            reasons.append(f"{variant.name}: {error}")
            if error.for_all:
                break
            continue
        if reasons:
            log.warning("The %s kernels are used, which are not the fastest for this processor (%s).", variant.name, "; ".join(reasons))
        return library
    raise build.NotBuilt("; ".join(reasons))


def _variant(variant: Variant, cache: Path | None) -> Library:
    """A file that is there, and else, or where it cannot be loaded, a new one."""
    library = None
    for path in build.there(variant, cache):
        try:
            library = Library(path)
            break
        except OSError as error:  # of another C library, or damaged
            log.warning("%s cannot be loaded (%s); it is compiled anew.", path, error)
    if library is None:
        path = build.make(variant, cache)
        try:
            library = Library(path)
        except OSError as error:
            raise build.NotBuilt(f"{path} cannot be loaded ({error})", for_all=True) from error
    if wrong := library.check():
        raise build.NotBuilt(f"its kernels {wrong.decode()}")
    return library
