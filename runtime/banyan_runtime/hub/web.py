"""GET over HTTP as a download needs it: streamed, through the proxies of the environment, and a token for one host alone."""

from __future__ import annotations

import contextlib
import email.utils
import re
import ssl
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import urljoin, urlsplit

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, SSLError

from banyan_runtime import __version__
from banyan_runtime.errors import ConfigError, UnavailableError
from banyan_runtime.hub.source import Interrupted

_TIMEOUT: Final = urllib3.Timeout(connect=10.0, read=30.0)
_REDIRECTS: Final = 5
_CONNECTIONS: Final = 16
_AGAIN: Final = (408, 425, 429)


class Web:
    """Requests to `endpoint` and wherever it redirects. `token` is sent to the endpoint's own scheme, host and port, nowhere else."""

    def __init__(self, endpoint: str, token: str | None) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError("HF_ENDPOINT must be a URL like https://huggingface.co, without a query")
        self.endpoint = endpoint.rstrip("/")
        self.name = shown(endpoint)
        self._origin = _origin(endpoint)
        self._token = token
        self._pools: dict[str | None, urllib3.PoolManager] = {}

    @contextlib.contextmanager
    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Iterator[urllib3.BaseHTTPResponse]:
        """The answer to GET endpoint/path behind all redirects, its body unread.

        Raises Interrupted for what another try may mend: no connection, 408, 425, 429, 5xx, a refusal by another host than the
        endpoint (an address that was given out and has run out), and a body that breaks off while it is read.
        """
        url = f"{self.endpoint}/{path}"
        sent = {"User-Agent": f"banyan-runtime/{__version__}", "Accept-Encoding": "identity"} | dict(headers or {})
        for _ in range(_REDIRECTS + 1):
            ours = _origin(url) == self._origin
            with self._answer(url, sent | ({"Authorization": f"Bearer {self._token}"} if ours and self._token else {})) as answer:
                if answer.status in (301, 302, 303, 307, 308) and (place := answer.headers.get("Location")):
                    url = urljoin(url, place)
                    if urlsplit(url).scheme not in ("http", "https"):
                        raise UnavailableError(f"{self.name}: redirects to something that is not http")
                    continue
                if answer.status >= 500 or answer.status in _AGAIN or (answer.status >= 400 and answer.status != 416 and not ours):
                    raise Interrupted(f"{shown(url)} answered {answer.status}", _retry_after(answer.headers.get("Retry-After")))
                yield answer
                return
        raise UnavailableError(f"{self.name}: redirects more than {_REDIRECTS} times")

    @contextlib.contextmanager
    def _answer(self, url: str, headers: Mapping[str, str]) -> Iterator[urllib3.BaseHTTPResponse]:
        answer: urllib3.BaseHTTPResponse | None = None
        try:
            answer = self._pool(url).request(
                "GET", url, headers=headers, preload_content=False, decode_content=False, redirect=False, retries=False, timeout=_TIMEOUT
            )
            yield answer
        except SSLError as error:
            if isinstance(cause := error.__cause__ or error.__context__ or error.args[0], ssl.SSLCertVerificationError):
                raise UnavailableError(
                    f"{shown(url)}: its certificate is not trusted ({cause.verify_message}); name your own CA's bundle in SSL_CERT_FILE"
                ) from error
            raise Interrupted(f"{shown(url)}: {type(error).__name__}", unanswered=answer is None) from error
        except LocationParseError as error:
            raise UnavailableError(f"{shown(url)}: is no address that can be asked") from error
        except (HTTPError, OSError) as error:
            raise Interrupted(f"{shown(url)}: {_reason(error)}", unanswered=answer is None) from error
        finally:
            if answer is not None:
                answer.close()  # half a body may be unread: such a connection serves no other request

    def _pool(self, url: str) -> urllib3.PoolManager:
        parts = urlsplit(url)
        proxies = urllib.request.getproxies_environment()
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if proxy and urllib.request.proxy_bypass_environment(parts.netloc, proxies):  # type: ignore[attr-defined]
            proxy = None
        if proxy not in self._pools:
            made: urllib3.PoolManager
            if proxy is None:
                made = urllib3.PoolManager(maxsize=_CONNECTIONS)
            else:
                where = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
                secret = f"{where.username}:{where.password or ''}" if where.username else None
                made = urllib3.ProxyManager(
                    where._replace(netloc=where.netloc.rpartition("@")[2]).geturl(),
                    proxy_headers=urllib3.make_headers(proxy_basic_auth=secret) if secret else None,
                    maxsize=_CONNECTIONS,
                )
            self._pools[proxy] = made
        return self._pools[proxy]


def shown(url: str) -> str:
    """Scheme, host and port: paths behind a redirect carry signatures, and a URL can carry a password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _reason(error: BaseException) -> str:
    """What went wrong, without the URL that urllib3's own words hold."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    below = error.__cause__ or error.__context__
    named = f"{type(below).__name__}: {below.strerror}" if isinstance(below, OSError) and below.strerror else ""
    return named or re.sub(r"(?<!^)(?=[A-Z][a-z])", " ", type(error).__name__).removesuffix(" Error").lower()


def _retry_after(text: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if text is None:
        return None
    if text.strip().isdigit():
        return float(text.strip()[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
