"""The NetworkPolicy of a resource's pods: who may ask them, and what they need to reach."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from banyan_operator.api import InferenceServer, Problem, Resource, SpecError
from banyan_operator.api.parts import ModelSource
from banyan_operator.api.uris import CatalogModel, Remote, locate
from banyan_operator.desired.metadata import child, pod_selector, server_selector
from banyan_operator.desired.names import derived
from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT
from banyan_operator.kube.kinds import NETWORK_POLICY
from banyan_operator.plan import Manifest, Settings

_NAMESPACE: Final = "kubernetes.io/metadata.name"
_HTTPS: Final = 443
_DNS: Final = {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}  # to anywhere: a cache may be on the node


def network_policy(resource: Resource, settings: Settings) -> Manifest:
    """The policy of a resource that wants one. The kubelet's probes pass in any case."""
    name = resource.metadata.name if isinstance(resource, InferenceServer) else derived(resource.metadata.name, "batch")
    spec: Manifest = {
        "podSelector": {"matchLabels": pod_selector(resource)},
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
        yield from _model(resource.spec.model, "spec.model", resource.metadata.namespace)
        return
    spec, namespace = resource.spec, resource.metadata.namespace
    if spec.server_ref is not None:
        yield {"to": [{"podSelector": {"matchLabels": server_selector(spec.server_ref.name)}}], "ports": _ports(SERVER_PORT)}
    if spec.server is not None:
        yield from _model(spec.server.model, "spec.server.model", namespace)
    if any(uri.startswith("s3://") for uri in (spec.input.source, spec.output.uri)):
        yield from _host(spec.s3.endpoint if spec.s3 else None, "spec.s3.endpoint", namespace)


def _model(model: ModelSource, path: str, namespace: str) -> Iterator[Manifest]:
    match locate(model.uri):
        case CatalogModel():
            yield {"ports": _ports(_HTTPS)}
        case Remote("s3"):
            yield from _host(model.s3.endpoint if model.s3 else None, f"{path}.s3.endpoint", namespace)
        case Remote("hf"):
            endpoint = model.hugging_face.endpoint if model.hugging_face else None
            yield from _host(endpoint, f"{path}.huggingFace.endpoint", namespace)


def _host(url: str | None, field: str, namespace: str) -> Iterator[Manifest]:
    """To the host of a URL that stands in `field`; None is one on the internet, by HTTPS. Raises SpecError for what is no URL."""
    if not url:
        yield {"ports": _ports(_HTTPS)}
        return
    try:
        found = urlsplit(url)
        port = found.port or (_HTTPS if found.scheme == "https" else 80)
    except ValueError as error:  # its words tell what is wrong: the port, a bracket
        raise SpecError([Problem(field, f"{url!r} is no URL of a host: {error}. Write http(s)://HOST or http(s)://HOST:PORT")]) from None
    yield {"ports": _ports(port)}
    labels = (found.hostname or "").removesuffix(".").removesuffix(".cluster.local").split(".")
    if len(labels) <= 2 or labels[2:] == ["svc"]:  # a Service: behind it, pods may listen on another port than its own
        yield {"to": [_namespace(labels[1] if len(labels) > 1 else namespace)]}


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE: name}}}


def _ports(port: int) -> list[Manifest]:
    return [{"port": port, "protocol": "TCP"}]
