"""Models of the Hugging Face hub, or of a mirror with its API, by huggingface_hub: its cache, its tokens, its Xet storage.

It compares sizes, and hashes only what comes through Xet. So each file is compared with its hash in the repository's listing here.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx2
from huggingface_hub import HfApi, constants, get_token, snapshot_download
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

from banyan_runtime import __version__
from banyan_runtime.errors import AccessError, ConfigError, ModelError, SourceUnreachable, UnavailableError
from banyan_runtime.hub import cache
from banyan_runtime.hub.address import HubRepo
from banyan_runtime.hub.manifest import Entry, checked
from banyan_runtime.hub.progress import Bar, Report
from banyan_runtime.hub.source import Digest, RemoteFile, needed

log = logging.getLogger("banyan")

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
FILES_AT_ONCE: Final = 8
_TIMEOUT_S: Final = 20.0
_BYTES: Final = "huggingface_hub.snapshot_download"  # the name of the bar that counts the bytes that are on the disk


def fetch(repo: HubRepo, home: Path, report: Report, *, into: Path | None = None, hashes: bool = False) -> Path:
    """The folder of the model: a snapshot in the cache of huggingface_hub below `home`, or `into`. A commit that is here, whole, is not
    asked for. Where the hub does not answer, the commit that a branch was last is taken.

    Raises ModelError for an unknown repository or revision, for one that is no model and for damaged files; AccessError for one that the
    token may not read; SourceUnreachable and UnavailableError for a hub that does not answer, or not as a hub; and as `cache.ensure`.
    """
    hub_logging.set_verbosity(logging.ERROR)  # its warnings show signed URLs
    place = home / f"models--{repo.name.replace('/', '--')}"
    ref = place / "refs" / repo.revision
    own = into is not None or bool(repo.gguf)

    def folder_of(commit: str) -> Path:
        """One for each GGUF file: a snapshot would look whole with another one."""
        return into or place / (f"gguf/{quote(repo.gguf, safe='')}" if repo.gguf else "snapshots") / commit

    if COMMIT.fullmatch(repo.revision) and cache.whole(folder_of(repo.revision), repo.revision, hashes=hashes):
        return folder_of(repo.revision)
    try:
        commit, files = _listing(repo)
    except UnavailableError as error:
        last = ref.read_text() if ref.is_file() else ""
        if not last or not cache.whole(folder_of(last), last, hashes=hashes):
            raise
        log.warning("%s; the version that was fetched before is used (%s)", error, last[:12])
        return folder_of(last)

    def bring(folder: Path) -> dict[str, Entry]:
        _download(repo, commit, files, folder, home, report, own_folder=own)
        return checked(folder, files, str(repo))

    folder = cache.ensure(folder_of(commit), str(repo), commit, bring, report, hashes=hashes)
    if repo.revision != commit and into is None and (not ref.is_file() or ref.read_text() != commit):
        with suppress(OSError):  # of a volume that may not be written: the model is there all the same
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)
    return folder


def _listing(repo: HubRepo) -> tuple[str, list[RemoteFile]]:
    """The commit that a revision is now, and the files of it that serving reads."""
    try:
        token = get_token()
    except OSError as error:
        raise AccessError(f"cannot be read ({error.strerror}); give this user read access", field="HF_TOKEN_PATH") from error
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ConfigError("holds characters that a token cannot have; give the token alone", field="HF_TOKEN")
    with _judged(repo):
        info = HfApi(endpoint=_endpoint(), library_name="banyan", library_version=__version__).model_info(
            repo.name, revision=repo.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    if info.sha is None or not COMMIT.fullmatch(info.sha) or info.siblings is None:
        raise _no_hub(repo)
    files = []
    for found in info.siblings:
        if found.size is None or not (found.lfs or found.blob_id):
            raise _no_hub(repo)
        digest = Digest("sha256", found.lfs.sha256) if found.lfs else Digest("git", str(found.blob_id))
        files.append(RemoteFile(found.rfilename, found.size, digest=digest))
    return info.sha, needed(files, str(repo), repo.gguf)


def _download(repo: HubRepo, commit: str, files: list[RemoteFile], folder: Path, home: Path, report: Report, *, own_folder: bool) -> None:
    here = sum(file.size for file in files if (folder / file.name).is_file())
    total = sum(file.size for file in files)
    cache.make_room(folder, total - here, str(repo))
    lock = threading.Lock()
    with Bar(f"Downloading {repo}", total, unit="B", phase="downloading", report=report) as bar:
        bar.to(here)

        class Counted(hub_tqdm):
            """Shows nothing and moves our bar."""

            def __init__(self, *args: Any, **options: Any) -> None:
                self._counts = options.get("name") == _BYTES
                super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

            def update(self, n: float | None = 1) -> bool | None:
                if self._counts:
                    with lock:
                        bar.advance(int(n or 0))
                return None

        with _judged(repo):
            snapshot_download(
                repo.name,
                revision=commit,
                cache_dir=home,
                local_dir=folder if own_folder else None,
                allow_patterns=[file.name for file in files],
                max_workers=FILES_AT_ONCE,
                tqdm_class=Counted,
                endpoint=_endpoint(),
                library_name="banyan",
                library_version=__version__,
            )
        bar.to(total)


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _host() -> str:
    """Scheme and host of the endpoint: a URL can carry a password."""
    parts = urlsplit(_endpoint())
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _no_hub(repo: HubRepo) -> UnavailableError:
    return UnavailableError(f"{repo}: {_host()} does not answer as a Hugging Face hub does; check HF_ENDPOINT")


@contextmanager
def _judged(repo: HubRepo) -> Iterator[None]:
    """Turn the errors of huggingface_hub into ours. Their words are not shown: they hold URLs, which can be signed."""
    try:
        yield
    except (hub_errors.HfHubHTTPError, hub_errors.LocalEntryNotFoundError) as error:
        cause = error if isinstance(error, hub_errors.HfHubHTTPError) else error.__cause__
        if isinstance(cause, hub_errors.HfHubHTTPError):
            raise _refusal(repo, cause) from error
        raise _unreachable(repo, cause or error) from error
    except (httpx2.HTTPError, hub_errors.OfflineModeIsEnabled) as error:
        raise _unreachable(repo, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise UnavailableError(f"{repo}: {_host()} sent a file that is not whole ({type(error).__name__}); try again later") from error
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # of what is no listing, and of Xet
        raise _no_hub(repo) from error


def _refusal(repo: HubRepo, error: hub_errors.HfHubHTTPError) -> Exception:
    status, code = error.response.status_code, error.response.headers.get("X-Error-Code", "")
    said = f"{repo}: {_host()} answered {status}" + (f" ({code[:40]})" if code else "")
    if status in (401, 403):
        return AccessError(
            f"{said}; it is private, its terms must be accepted there, or there is none of this name: check the name, and set HF_TOKEN "
            "to a token that may read it (or HF_TOKEN_PATH to a file that holds one)"
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return ModelError(f"{said}; the model {repo.name} has no revision '{repo.revision}'", code="model_not_found")
    if status == 404:
        message = f"{said}; there is no model '{repo.name}' with a revision '{repo.revision}': check both"
        return ModelError(message, code="model_not_found")
    return UnavailableError(f"{said}; try again later, or check HF_ENDPOINT")


def _unreachable(repo: HubRepo, error: BaseException) -> UnavailableError:
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return UnavailableError(f"{repo}: is not in the cache, and HF_HUB_OFFLINE keeps it from being fetched; unset it")
    below: BaseException | None = error
    while below is not None and not (isinstance(below, OSError) and below.strerror):
        below = below.__cause__ or below.__context__
    reason = below.strerror if isinstance(below, OSError) else type(error).__name__
    return SourceUnreachable(
        f"{repo}: {_host()}: {reason}; check the network, the proxy (HTTPS_PROXY) and the mirror (HF_ENDPOINT), if there are any"
    )
