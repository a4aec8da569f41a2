"""The child objects of an InferenceServer."""

from __future__ import annotations

from banyan_operator.api import InferenceServer
from banyan_operator.desired import podspec, serverpod
from banyan_operator.desired.companions import cache_claim, service_account
from banyan_operator.desired.metadata import (
    DEFAULT_IMAGE,
    RENDERED_GENERATION,
    RENDERED_TEMPLATE,
    SPEC_HASH,
    TEMPLATE_LAYOUT,
    child,
    default_image,
    digest,
    labels,
    selector,
)
from banyan_operator.desired.podtemplate import merged
from banyan_operator.kube.addresses import SERVER_PORT, SERVER_PORT_NAME
from banyan_operator.plan import Manifest, Settings


def children(server: InferenceServer, settings: Settings, live: Manifest | None = None) -> tuple[Manifest, ...]:
    """All objects that `server` wants, in the order in which they are applied. `live`: its Deployment as it is, if there is one.

    Raises SpecError when spec.podTemplate cannot be merged.
    """
    found: list[Manifest] = []
    if server.spec.service_account_name is None:
        found.append(service_account(server, settings, f"{server.metadata.name}-server"))
    if server.spec.cache.type == "PersistentVolumeClaim" and server.spec.cache.claim_name is None:
        found.append(cache_claim(server, settings, server.spec.cache))
    found += [_service(server, settings), _pod_service(server, settings), deployment(server, settings, live)]
    if server.spec.ingress is not None and settings.platform == "cluster":  # in local mode there is nobody to serve it
        found.append(_ingress(server, settings))
    return tuple(found)


def deployment(server: InferenceServer, settings: Settings, live: Manifest | None = None) -> Manifest:
    """The Deployment that serves `server`. Equal specs give byte-equal manifests, so a diff means a change."""
    spec = server.spec
    image = spec.runtime.image or default_image(server, live, settings)
    annotations = {RENDERED_GENERATION: str(server.metadata.generation), RENDERED_TEMPLATE: TEMPLATE_LAYOUT}
    if spec.runtime.image is None:
        annotations[DEFAULT_IMAGE] = image
    strategy: Manifest = {"type": spec.rollout.strategy}
    if spec.rollout.strategy == "RollingUpdate":
        strategy["rollingUpdate"] = {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable}
    return child(
        server,
        settings,
        api_version="apps/v1",
        kind="Deployment",
        name=server.metadata.name,
        annotations=annotations,
        body={
            "spec": {
                "replicas": spec.replicas,
                "selector": {"matchLabels": selector(server)},
                "strategy": strategy,
                "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
                "revisionHistoryLimit": spec.rollout.revision_history_limit,
                "template": _template(server, image, settings),
            }
        },
    )


def _template(server: InferenceServer, image: str, settings: Settings) -> Manifest:
    spec = server.spec
    container, mounts = serverpod.container(serverpod.of_server(server), image, settings)
    pod: Manifest = {
        "serviceAccountName": spec.service_account_name or f"{server.metadata.name}-server",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": spec.drain.termination_grace_period_seconds,
        "securityContext": podspec.pod_security(spec.security),
        "containers": [container],
        "volumes": podspec.volumes(mounts),
        **podspec.placement(spec.scheduling, spec.accelerator, selector(server), spread=True),
    }
    if secrets := podspec.pull_secrets(spec.runtime.image_pull_secrets, settings.image_pull_secrets):
        pod["imagePullSecrets"] = secrets
    template = merged({"metadata": {"labels": labels(server)}, "spec": pod}, spec.pod_template)
    annotations = {**template["metadata"].get("annotations", {}), SPEC_HASH: digest(template)}
    return {"metadata": {**template["metadata"], "annotations": annotations}, "spec": template["spec"]}


def _service(server: InferenceServer, settings: Settings) -> Manifest:
    service = server.spec.service
    return child(
        server,
        settings,
        api_version="v1",
        kind="Service",
        name=server.metadata.name,
        annotations=dict(service.annotations),
        extra_labels=dict(service.labels),
        body={"spec": {"type": service.type, "selector": selector(server), "ports": [_port(service.port)]}},
    )


def _pod_service(server: InferenceServer, settings: Settings) -> Manifest:
    """The headless Service: one address a ready pod, for clients and routers that choose a pod themselves."""
    spec = {"clusterIP": "None", "selector": selector(server), "ports": [_port(SERVER_PORT)]}
    return child(server, settings, api_version="v1", kind="Service", name=f"{server.metadata.name}-pods", body={"spec": spec})


def _port(port: int) -> Manifest:
    return {"name": SERVER_PORT_NAME, "port": port, "targetPort": SERVER_PORT_NAME, "protocol": "TCP"}


def _ingress(server: InferenceServer, settings: Settings) -> Manifest:
    ingress = server.spec.ingress
    assert ingress is not None
    backend = {"service": {"name": server.metadata.name, "port": {"name": SERVER_PORT_NAME}}}
    paths = [{"path": ingress.path, "pathType": "Prefix", "backend": backend}]
    spec: Manifest = {"rules": [{"host": host, "http": {"paths": paths}} for host in ingress.hosts]}
    if ingress.class_name is not None:
        spec["ingressClassName"] = ingress.class_name
    if ingress.tls_secret_name is not None:
        spec["tls"] = [{"hosts": list(ingress.hosts), "secretName": ingress.tls_secret_name}]
    return child(
        server,
        settings,
        api_version="networking.k8s.io/v1",
        kind="Ingress",
        name=server.metadata.name,
        annotations=dict(ingress.annotations),
        body={"spec": spec},
    )
