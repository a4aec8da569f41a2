"""The way to the API server, and who we are there: one configuration for kopf's watches and for our own calls."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, Final

import kopf
from kubernetes.aio import client as kube_client
from kubernetes.aio import config as kube_config

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


async def load() -> kube_client.Configuration:
    """By the pod's service account where there is one, else by $KUBECONFIG or ~/.kube/config, `exec` plugins included.

    Loading again gives fresh credentials. Raises kubernetes' ConfigException, or OSError, where there is no usable one.
    """
    config: Any = kube_config  # untyped
    configuration = kube_client.Configuration()
    if "KUBECONFIG" not in os.environ and (_SERVICE_ACCOUNT / "token").exists():
        config.load_incluster_config(client_configuration=configuration)
    else:
        await config.load_kube_config(client_configuration=configuration)
    configuration.retries = None  # the queue backs off. (False would be read as 0 tries, which the library counts up to for ever.)
    return configuration


async def for_kopf(configuration: kube_client.Configuration) -> kopf.ConnectionInfo:
    """The same configuration as kopf wants it."""
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
