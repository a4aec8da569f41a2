"""What a `--model-path` can be besides a folder: catalog://NAME, hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX; of GGUF files also
hf://ORG/NAME:QUANTIZATION[@REVISION], hf://ORG/NAME/FILE.gguf[@REVISION] and s3://BUCKET/PREFIX/FILE.gguf.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from banyan_runtime.errors import ConfigError

_HUB_NAME: Final = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_HUB_GGUF: Final = re.compile(r"([^/:]+/[^/:]+)(?::([A-Za-z0-9][\w-]{0,30})|/((?:[A-Za-z0-9_][\w.+-]*/){0,4}[\w.+-]+\.gguf))", re.ASCII)
_HUB_REVISION: Final = re.compile(r"[A-Za-z0-9][\w./-]{0,254}", re.ASCII)
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[^\s?#\\]{0,900}")
MAIN: Final = "main"


@dataclass(frozen=True, slots=True)
class Catalog:
    """catalog://NAME"""

    name: str

    def __str__(self) -> str:
        return f"catalog://{self.name}"


@dataclass(frozen=True, slots=True)
class HubRepo:
    """hf://ORG/NAME[@REVISION]; a revision is a branch, a tag or a commit. `gguf`: the file of several that is wanted, by its name or by
    its quantization (Q4_K_M)."""

    name: str
    revision: str
    gguf: str = ""

    def __str__(self) -> str:
        file = f"{'/' if self.gguf.endswith('.gguf') else ':'}{self.gguf}" if self.gguf else ""
        return f"hf://{self.name}{file}" + (f"@{self.revision}" if self.revision != MAIN else "")


@dataclass(frozen=True, slots=True)
class BucketPrefix:
    """s3://BUCKET/PREFIX: the objects of one folder; `prefix` has no slash at its ends. `gguf`: the file of them that is wanted."""

    bucket: str
    prefix: str
    gguf: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (f"s3://{self.bucket}", self.prefix, self.gguf) if part)


Address = Catalog | HubRepo | BucketPrefix


def parse(model_path: str, revision: str | None = None) -> Address | None:
    """The address that a `--model-path` is; None for a folder. `revision` is that of an hf:// address that names none.

    Raises ConfigError for an address of another kind, or one that is not well formed.
    """
    scheme, separator, rest = model_path.partition("://")
    if not separator:
        return None
    if scheme == "catalog":
        return Catalog(rest)
    if scheme == "hf":
        name, at, named = rest.partition("@")
        wanted, gguf = named if at else revision or MAIN, ""
        if match := _HUB_GGUF.fullmatch(name):
            name, gguf = match[1], match[2] or match[3]
        if not _HUB_NAME.fullmatch(name) or ".." in name:
            raise ConfigError(
                "an hf:// address is hf://ORG/NAME or hf://ORG/NAME@REVISION; of a GGUF file hf://ORG/NAME:Q4_K_M or hf://ORG/NAME/FILE.gguf",
                field="--model-path",
            )
        if not _HUB_REVISION.fullmatch(wanted) or ".." in wanted:
            raise ConfigError("the revision must be a branch, a tag or a commit", field="--model-path", value=f"hf://{name}")
        if at and revision and revision != named:
            raise ConfigError(f"names another revision than --revision={revision}; remove one", field="--model-path", value=model_path)
        return HubRepo(name, wanted, gguf)
    if scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        if not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/"):
            raise ConfigError(
                "an s3:// address is s3://BUCKET/PREFIX, without credentials, '?', '#' and spaces; BUCKET is 3 to 63 small letters, "
                "digits, '.' and '-'",
                field="--model-path",
            )
        folder, _, name = prefix.strip("/").rpartition("/")
        return BucketPrefix(bucket, folder, name) if name.endswith(".gguf") else BucketPrefix(bucket, prefix.strip("/"))
    message = "only a folder, catalog://NAME, hf://ORG/NAME or s3://BUCKET/PREFIX can be served"
    raise ConfigError(message, field="--model-path", value=f"{scheme}://…")


def served_name(model_path: str) -> str:
    """What a model is called where it was given no name: NAME of catalog://NAME, ORG/NAME of hf://ORG/NAME@REVISION, else the path."""
    for scheme in ("catalog://", "hf://"):
        if model_path.startswith(scheme):
            return model_path.removeprefix(scheme).partition("@")[0]
    return model_path
