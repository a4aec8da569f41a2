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
        self._logins = 0
        self._given: kube_client.Configuration | None = None  # to kopf

    async def login(self) -> kopf.ConnectionInfo:
        """What kopf connects with. Kopf asks at first, and again when it is refused (401)."""
        if self._given is not None and not await self.renew(self._given):
            await asyncio.sleep(1.0)  # the old ones then, which may be good again
        self._given = self.configuration
        self._logins += 1
        return await _described(self._given, self._logins)

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


async def _described(configuration: kube_client.Configuration, login: int) -> kopf.ConnectionInfo:
    """The configuration in kopf's words. `login` makes each different: kopf takes none that equals one that was refused."""
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
        priority=login,
    )
