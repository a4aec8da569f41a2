"""The NetworkPolicy of a resource's pods: who may ask them, and what they need to reach."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from banyan_operator.api import InferenceServer, Resource
from banyan_operator.api.parts import ModelSource, S3Options
from banyan_operator.api.uris import CatalogModel, Remote, locate
from banyan_operator.desired.metadata import child, selector, server_selector
from banyan_operator.desired.names import derived
from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT
from banyan_operator.kube.kinds import NETWORK_POLICY
from banyan_operator.plan import Manifest, Settings

_NAMESPACE: Final = "kubernetes.io/metadata.name"
_HTTPS: Final = 443
_DNS: Final = {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}  # to anywhere: a cache may be on the node
_STORAGE: Final = "AWS_ENDPOINT_URL_S3"


def network_policy(resource: Resource, settings: Settings) -> Manifest:
    """The policy of a resource that wants one. The kubelet's probes pass in any case."""
    name = resource.metadata.name if isinstance(resource, InferenceServer) else derived(resource, "batch")
    spec: Manifest = {
        "podSelector": {"matchLabels": selector(resource)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [_ingress(resource, settings)],
        "egress": [_DNS, *_egress(resource, settings), *resource.spec.network_policy.egress],
    }
    kind = NETWORK_POLICY
    return child(resource, settings, api_version=kind.api_version, kind=kind.kind, name=name, body={"spec": copy.deepcopy(spec)})


def _ingress(resource: Resource, settings: Settings) -> Manifest:
    policy = resource.spec.network_policy
    peers: list[Any] = list(policy.from_) or [{"podSelector": {}}]
    peers += policy.metrics_from
    if settings.namespace:
        peers.append(_namespace(settings.namespace))  # the operator asks how far the pods are
    port = SERVER_PORT if isinstance(resource, InferenceServer) else PROGRESS_PORT
    return {"from": peers, "ports": _ports(port)}


def _egress(resource: Resource, settings: Settings) -> Iterator[Manifest]:
    """Rules for what is known to be needed. Claims need none: the node mounts them."""
    if isinstance(resource, InferenceServer):
        yield from _model(resource.spec.model, resource.metadata.namespace)
        return
    spec, namespace = resource.spec, resource.metadata.namespace
    if spec.server_ref is not None:
        yield {"to": [{"podSelector": {"matchLabels": server_selector(spec.server_ref.name)}}], "ports": _ports(SERVER_PORT)}
    if spec.server is not None:
        yield from _model(spec.server.model, namespace)
    if any(uri.startswith("s3://") for uri in (spec.input.uri, spec.output.uri)):
        yield from _storage(spec.s3, settings.default_storage.get(_STORAGE), namespace)


def _model(model: ModelSource, namespace: str) -> Iterator[Manifest]:
    match locate(model.uri):
        case CatalogModel():
            yield {"ports": _ports(_HTTPS)}
        case Remote("s3"):
            yield from _storage(model.s3, None, namespace)
        case Remote("hf"):
            yield from _host(model.hugging_face.endpoint if model.hugging_face else None, namespace)


def _storage(options: S3Options | None, default: str | None, namespace: str) -> Iterator[Manifest]:
    yield from _host((options.endpoint if options else None) or default, namespace)


def _host(url: str | None, namespace: str) -> Iterator[Manifest]:
    """To the host of a URL; None is one on the internet, by HTTPS."""
    if url is None:
        yield {"ports": _ports(_HTTPS)}
        return
    found = urlsplit(url)
    port = found.port or (_HTTPS if found.scheme == "https" else 80)
    yield {"ports": _ports(port)}
    labels = (found.hostname or "").removesuffix(".").removesuffix(".cluster.local").split(".")
    if len(labels) <= 2 or labels[2:] == ["svc"]:  # a Service: behind it, pods may listen on another port than its own
        yield {"to": [_namespace(labels[1] if len(labels) > 1 else namespace)]}


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE: name}}}


def _ports(port: int) -> list[Manifest]:
    return [{"port": port, "protocol": "TCP"}]
