"""Models of the Hugging Face hub, or of a mirror with its API: one call lists a revision's files with sizes and hashes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import urllib3

from banyan_runtime.errors import AccessError, ConfigError, ModelError, UnavailableError
from banyan_runtime.hub.address import HubRepo
from banyan_runtime.hub.files import parse_object, shown
from banyan_runtime.hub.source import Digest, Interrupted, Listing, RemoteFile, needed
from banyan_runtime.hub.web import Web

ENDPOINT: Final = "https://huggingface.co"
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_ANSWER_BYTES: Final = 16 << 20  # a repository of 10,000 files takes 4 MB
_PIECE: Final = 1 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LARGEST: Final = 1 << 50


class HubSource:
    """A `Source`. HF_ENDPOINT names a mirror; HF_TOKEN, else the file HF_TOKEN_PATH or HF_HOME/token, holds the token."""

    def __init__(self, repo: HubRepo, environment: Mapping[str, str]) -> None:
        self._repo = repo
        self._token = token(environment)
        self._web = Web(environment.get("HF_ENDPOINT") or ENDPOINT, self._token)
        self._commit = ""

    @property
    def title(self) -> str:
        return str(self._repo)

    @property
    def asked(self) -> str:
        return self._web.name

    @property
    def remedy(self) -> str:
        return "check the network, the proxy (HTTPS_PROXY) and the mirror (HF_ENDPOINT), if there are any"

    def listing(self) -> Listing:
        where = f"api/models/{self._repo.name}/revision/{quote(self._repo.revision, safe='')}?blobs=true"
        with self._web.get(where) as answer:
            if answer.status != 200:
                raise self._refusal(answer)
            content = answer.read(_ANSWER_BYTES + 1)
        if len(content) > _ANSWER_BYTES:
            raise ModelError(
                f"{self.title}: {self._web.name} lists it in more than {_ANSWER_BYTES >> 20} MiB; no model has that many files"
            )
        found = parse_object(content, f"{self.title}: the answer of {self._web.name}")
        commit, siblings = found.get("sha"), found.get("siblings")
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise UnavailableError(f"{self.title}: {self._web.name} answered without 'sha' and 'siblings'; it does not speak the hub's API")
        files = [file for entry in siblings if (file := self._file(entry)) is not None]
        self._commit = commit
        return Listing(commit, needed(files, self.title))

    def digest(self, file: RemoteFile) -> Digest | None:
        return file.digest

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        assert self._commit, "listed first"
        path = f"{self._repo.name}/resolve/{self._commit}/{quote(file.name)}"
        # The address holds the commit, so what is there never changes, and the whole file is hashed: the range needs no condition.
        with self._web.get(path, {"Range": f"bytes={start}-"} if start else {}) as answer:
            behind = start
            if answer.status == 206:
                if not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                    raise Interrupted(f"{self._web.name} sent another range of {file.name} than was asked for")
                behind = 0
            elif answer.status != 200:
                raise self._refusal(answer)
            for piece in answer.stream(_PIECE, decode_content=False):
                if behind >= len(piece):  # a server that takes no ranges sends what is here already once more
                    behind -= len(piece)
                else:
                    yield piece[behind:]
                    behind = 0

    def _file(self, entry: Any) -> RemoteFile | None:
        """A file of the listing; None for one in a subfolder, of which serving reads none."""
        name = entry.get("rfilename") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise UnavailableError(f"{self.title}: {self._web.name} lists {shown(entry)}, which is no file")
        if "/" in name:
            return None
        lfs = entry.get("lfs")
        large: dict[str, Any] = lfs if isinstance(lfs, dict) else {}
        size, sha256, blob = large.get("size", entry.get("size")), large.get("sha256"), entry.get("blobId")
        if type(size) is not int or not 0 <= size < _LARGEST:
            raise UnavailableError(f"{self.title}: {self._web.name} lists {shown(name)} without its size")
        if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
            return RemoteFile(name, size, sha256, Digest("sha256", sha256))
        if isinstance(blob, str) and COMMIT.fullmatch(blob) and not large:
            return RemoteFile(name, size, blob, Digest("git", blob))
        raise UnavailableError(f"{self.title}: {self._web.name} lists {shown(name)} without its hash")

    def _refusal(self, answer: urllib3.BaseHTTPResponse) -> Exception:
        code = str(answer.headers.get("X-Error-Code", ""))
        said = f"{self._web.name} answered {answer.status}" + (f" ({shown(code)[1:-1]})" if code else "")
        if answer.status in (401, 403):
            if self._token:
                return AccessError(
                    f"{self.title}: {said}; the token in HF_TOKEN may not read it: accept the model's terms there, or give another"
                )
            return AccessError(
                f"{self.title}: {said}; it is private, its terms must be accepted, or there is none of this name: check the name, and set "
                "HF_TOKEN to a token that may read it (or HF_TOKEN_PATH to a file that holds one)"
            )
        if answer.status == 404 and code == "RevisionNotFound":
            return ModelError(f"{self.title}: {said}; the model {self._repo.name} has no revision '{self._repo.revision}'")
        if answer.status == 404 and code in ("", "RepoNotFound"):
            return ModelError(
                f"{self.title}: {said}; there is no model '{self._repo.name}' with a revision '{self._repo.revision}': check both"
            )
        return UnavailableError(f"{self.title}: {said}; this answer was not expected, check HF_ENDPOINT")


def token(environment: Mapping[str, str]) -> str | None:
    """The access token, from where the hub's own tools keep it. Raises ConfigError for one that no header can carry."""
    found = environment.get("HF_TOKEN", "").strip()
    if not found:
        home = environment.get("HF_HOME") or str(Path(environment.get("HOME", "/nonexistent")) / ".cache" / "huggingface")
        path = Path(environment.get("HF_TOKEN_PATH") or Path(home) / "token")
        try:
            found = path.read_text().strip() if path.is_file() else ""
        except (OSError, UnicodeDecodeError):
            raise AccessError(f"HF_TOKEN_PATH={path}: cannot be read; give this user read access") from None
        if not found and environment.get("HF_TOKEN_PATH"):
            raise ConfigError(f"HF_TOKEN_PATH={path}: no such file, or it is empty; it must hold a token")
    if found and not re.fullmatch(r"[!-~]{1,1000}", found):
        raise ConfigError("HF_TOKEN holds characters that a token cannot have; give the token alone")
    return found or None
