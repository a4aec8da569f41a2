"""The way to the API server, and who we are there: one configuration for kopf's watches and for our own calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import kopf
import yaml
from kubernetes.aio import client as kube_client
from kubernetes.aio import config as kube_config

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RENEW_EVERY_S: Final = 10.0  # where fresh credentials are refused too, another login so soon would not help

log = logging.getLogger(__name__)

Observer = Callable[[str, str, int, float], None]
"""Told of each call: host, method, status (0: no answer), seconds."""


class NoClusterError(Exception):
    """Nothing here says where a cluster is."""


def check() -> None:
    """Whether there is a configuration, without asking anybody. Raises NoClusterError.

    What needs another to answer (an `exec` plugin, the API server) is not tried: that may come later.
    """
    config: Any = kube_config  # untyped
    try:
        if _in_pod():
            config.load_incluster_config(client_configuration=kube_client.Configuration())
        else:
            config.list_kube_config_contexts()
    except (OSError, kube_config.ConfigException, yaml.YAMLError, TypeError, AttributeError) as error:  # the last two: it is no mapping
        said = " ".join(str(error).split()).rstrip(".")
        remedy = "set KUBECONFIG to a kubeconfig with a current context, or run in a pod with a service account"
        raise NoClusterError(f"no cluster: {remedy} ({said})") from error


async def load() -> kube_client.Configuration:
    """By the pod's service account where there is one, else by $KUBECONFIG or ~/.kube/config, `exec` plugins included.

    Loading again gives fresh credentials. Raises kubernetes' ConfigException, or OSError, where there is no usable one.
    """
    config: Any = kube_config  # untyped
    configuration = kube_client.Configuration()
    if _in_pod():
        config.load_incluster_config(client_configuration=configuration)
    else:
        await config.load_kube_config(client_configuration=configuration)
    configuration.retries = None  # the queue backs off. (False would be read as 0 tries, which the library counts up to for ever.)
    return configuration


def _in_pod() -> bool:
    return "KUBECONFIG" not in os.environ and (_SERVICE_ACCOUNT / "token").exists()


class Connection:
    """The configuration in use. Who is refused with it (401) asks for a fresh one; all who were get the same."""

    def __init__(
        self,
        configuration: kube_client.Configuration,
        load: Callable[[], Awaitable[kube_client.Configuration]] = load,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.configuration = configuration
        self._load, self._clock = load, clock
        self._renewed = float("-inf")
        self._lock = asyncio.Lock()

    async def renew(self, refused: kube_client.Configuration) -> bool:
        """Log in again, unless somebody else has since `refused` was in use. False: there are no fresh credentials for now."""
        async with self._lock:
            if self.configuration is not refused:
                return True
            if self._clock() - self._renewed < RENEW_EVERY_S:
                return False
            self._renewed = self._clock()
            try:
                self.configuration = await self._load()
            except (OSError, kube_config.ConfigException) as error:
                log.error("no fresh credentials: %s", error)
                return False
            log.info("the API server refused the credentials; logged in again")
            return True


class KopfLogin:
    """Gives kopf sessions with the connection's configuration. Kopf asks for one at first and after each 401."""

    def __init__(
        self,
        connection: Connection,
        observe: Observer,
        asked: Callable[[str], None],
        listed: Callable[[str], None],
        watched: Callable[[str, bool], None],
    ) -> None:
        """`asked` is told the path of each request; `listed` that of each list that kopf has got; `watched` that of each watch, and whether
        it was allowed: kopf tries one that is refused again and again, and tells nobody but the log."""
        self._connection, self._observe, self._asked, self._listed, self._watched = connection, observe, asked, listed, watched
        self._given: kube_client.Configuration | None = None

    async def __call__(self) -> kopf.AiohttpSession:
        if self._given is not None and not await self._connection.renew(self._given):
            await asyncio.sleep(1.0)  # the old ones then, which may be good again
        self._given = self._connection.configuration
        info = await _described(self._given)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trace_configs=[self._tracing(urlsplit(info.server).path.rstrip("/"))],
        )
        return kopf.AiohttpSession(server=info.server, aiohttp_session=session)

    def _tracing(self, prefix: str) -> Any:
        """`prefix`: the path of the API server's own URL, where it is behind another server."""

        async def began(_: aiohttp.ClientSession, call: Any, made: aiohttp.TraceRequestStartParams) -> None:
            call.began = time.monotonic()
            self._asked(made.url.path.removeprefix(prefix))

        async def ended(_: aiohttp.ClientSession, call: Any, done: aiohttp.TraceRequestEndParams) -> None:
            self._observe(done.url.authority, done.method, done.response.status, time.monotonic() - call.began)
            watch, path, status = "watch" in done.url.query, done.url.path.removeprefix(prefix), done.response.status
            if done.method == "GET" and not watch and status == 200:
                self._listed(path)
            if done.method == "GET" and (status == 403 or (watch and status == 200)):
                self._watched(path, status == 200)

        async def failed(_: aiohttp.ClientSession, call: Any, done: aiohttp.TraceRequestExceptionParams) -> None:
            self._observe(done.url.authority, done.method, 0, time.monotonic() - call.began)

        tracing: Any = aiohttp.TraceConfig()
        tracing.on_request_start.append(began)
        tracing.on_request_end.append(ended)
        tracing.on_request_exception.append(failed)
        return tracing


async def _described(configuration: kube_client.Configuration) -> kopf.ConnectionInfo:
    """The configuration in kopf's words."""
    key: Any = configuration.get_api_key_with_prefix("BearerToken")
    if inspect.isawaitable(key):
        key = await key
    scheme, _, token = (key or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or None,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file or None,
        private_key_path=configuration.key_file or None,
        proxy_url=configuration.proxy or None,
    )
