"""A model folder for a GGUF file: its metadata as config.json, tokenizer.json and so on beside a link to the file.

Everything that reads a model reads a folder, so a `.gguf` becomes one: small, in the cache, made once for a version of the
file. What lies beside the file in a folder that was named wins over the metadata.

CACHE/gguf/NAME-DIGEST/
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from banyan_runtime.errors import AccessError, UnavailableError
from banyan_runtime.hub.files import TOKENIZERS
from banyan_runtime.hub.gguf import config, header
from banyan_runtime.hub.gguf.files import parts
from banyan_runtime.hub.gguf.header import Fields

log = logging.getLogger("banyan")

_SIZES: Final = ".banyan-sizes.json"  # of what was made
_FORM: Final = "2"  # of what is made; a change makes folders anew
_NAMED: Final = 80  # characters of a file's name in that of its folder


def unfold(file: Path, beside: Path | None, cache: Path, *, tokenizer: bool = True) -> Path:
    """The folder of a model whose weights are `file`; `beside` is a folder whose files count more than the metadata. Without
    `tokenizer` the file's own is left out: it may be of a kind that cannot be used.

    Raises ModelError for a file that is damaged or of an unknown kind, AccessError and UnavailableError where the cache may
    not be written or is full.
    """
    own = () if beside is None else tuple(sorted(path.name for path in beside.iterdir() if _counts(path)))
    makers: dict[str, Callable[[Fields], str]] = {name: make for name, make in _MAKERS.items() if name not in own}
    if not tokenizer or set(TOKENIZERS) & set(own):
        makers.pop("tokenizer.json", None)
    if not tokenizer:
        makers.pop("tokenizer_config.json", None)
    if beside is not None and not makers:
        return beside  # nothing is left to say
    whole = parts(file)
    target = cache / "gguf" / f"{file.stem[:_NAMED]}-{_digest(whole, (own, sorted(makers)))}"
    if _whole(target):
        return target
    fields = Fields(header.read(file))
    texts = {name: make(fields) for name, make in makers.items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name[:_NAMED]}.", dir=target.parent))
        try:
            for name, text in texts.items():
                (scratch / name).write_text(text, encoding="utf-8")
            for name in own:
                assert beside is not None
                (scratch / name).symlink_to((beside / name).resolve())
            for part in whole:
                (scratch / part.with_suffix(".gguf").name).symlink_to(part.resolve())
            sizes = {path.name: path.lstat().st_size for path in scratch.iterdir()}
            (scratch / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
            scratch.chmod(0o755)  # others may share the cache
            while not _whole(target):
                try:
                    scratch.rename(target)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                if not _whole(target):  # else another process was faster, with the same
                    target.rename(scratch.with_name(f"{scratch.name}.damaged"))
                    shutil.rmtree(scratch.with_name(f"{scratch.name}.damaged"), ignore_errors=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UnavailableError(
                f"{target.parent}: what {file.name} says of its tokenizer cannot be kept there ({error.strerror}); make room, or name "
                "another folder with --download-dir or BANYAN_CACHE"
            ) from error
        raise AccessError(
            f"{target.parent}: what {file.name} says of its tokenizer cannot be kept there ({error.strerror}); name another folder with "
            "--download-dir or BANYAN_CACHE"
        ) from error
    log.info("%s: its metadata was written to %s", file.name, target)
    return target


def described(file: Path) -> dict[str, str]:
    """All that a GGUF file says of its model, as the texts of a folder's files by their names. Raises ModelError."""
    fields = Fields(header.read(file))
    return {name: make(fields) for name, make in _MAKERS.items()}


def _whole(folder: Path) -> bool:
    """Whether a folder holds what was made for it. What was removed or cut off since is made anew: all of it comes from the file."""
    try:
        sizes = json.loads((folder / _SIZES).read_text(encoding="utf-8"))
        return all((folder / name).lstat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _counts(path: Path) -> bool:
    return not path.name.startswith(".") and path.suffix != ".gguf"


def _digest(whole: list[Path], beside: object) -> str:
    """Another one for every version of the files: by their places, sizes and times, since reading them all would take minutes."""
    known = [(str(part.resolve()), os.stat(part)) for part in whole]  # noqa: PTH116
    versions = [(path, found.st_size, found.st_mtime_ns, found.st_ino) for path, found in known]
    return hashlib.sha256(json.dumps([_FORM, versions, beside]).encode()).hexdigest()[:16]


def written(value: dict[str, Any]) -> str:
    """An object as the text of a JSON file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _tokenizer(fields: Fields) -> str:
    from banyan_runtime.hub.gguf import tokenizer  # its library is of no use to who only looks a folder up

    return tokenizer.tokenizer(fields)


_MAKERS: Final[dict[str, Callable[[Fields], str]]] = {
    "config.json": lambda fields: written(config.config(fields)),
    "generation_config.json": lambda fields: written(config.generation_config(fields)),
    "tokenizer_config.json": lambda fields: written(config.tokenizer_config(fields)),
    "tokenizer.json": _tokenizer,
}
"""What is made of the metadata, by its name in a model's folder."""
