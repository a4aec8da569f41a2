"""The child objects of an InferenceServer."""

from __future__ import annotations

from collections.abc import Iterable

from banyan_operator.api import InferenceServer
from banyan_operator.desired import podspec, revisions, serverpod
from banyan_operator.desired.companions import cache_claim, service_account
from banyan_operator.desired.metadata import HEADLESS, REFRESH, SPEC_DIGEST, SPEC_HASH, child, labels, selector
from banyan_operator.desired.monitors import monitors
from banyan_operator.desired.names import Names, derived
from banyan_operator.desired.network import network_policy
from banyan_operator.desired.podtemplate import merged
from banyan_operator.desired.revisions import Revision
from banyan_operator.kube.addresses import SERVER_PORT, SERVER_PORT_NAME
from banyan_operator.kube.kinds import DISRUPTION_BUDGET
from banyan_operator.plan import Manifest, Settings


def children(
    server: InferenceServer, settings: Settings, live: Iterable[Manifest] = (), absent: frozenset[str] = frozenset()
) -> tuple[Manifest, ...]:
    """All objects that `server` wants, in the order in which they are applied.

    `live`: its children as they are; `absent`: optional kinds that the cluster does not have, which are left out.
    Raises SpecError when spec.podTemplate cannot be merged.
    """
    live = tuple(live)
    names = Names.of(server)
    revision = revisions.revision(server, settings, live, revisions.decided(server, live) or pod_template(server, settings))
    spec = server.spec
    found: list[Manifest] = []
    if spec.service_account_name is None:
        found.append(service_account(server, settings, names.service_account))
    if spec.cache.type == "PersistentVolumeClaim" and spec.cache.claim_name is None:
        found.append(cache_claim(server, settings, names.cache_claim, spec.cache))
    found += [_service(server, settings), _pods_service(server, settings)]
    found += [*revision.records, deployment(server, settings, revision)]
    if spec.disruption.enabled and spec.replicas > 1:
        found.append(_disruption_budget(server, settings))
    if spec.network_policy.enabled:
        found.append(network_policy(server, settings))
    if spec.ingress is not None:
        found.append(_ingress(server, settings))
    return (*found, *monitors(server, settings, absent))


def deployment(server: InferenceServer, settings: Settings, revision: Revision) -> Manifest:
    """The Deployment that serves `server`. Equal specs give byte-equal manifests, so a diff means a change."""
    spec = server.spec
    strategy: Manifest = {"type": spec.rollout.strategy}
    if spec.rollout.strategy == "RollingUpdate":
        strategy["rollingUpdate"] = {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable}
    return child(
        server,
        settings,
        api_version="apps/v1",
        kind="Deployment",
        name=server.metadata.name,
        annotations={SPEC_DIGEST: revision.spec_digest},
        body={
            "spec": {
                "replicas": spec.replicas,
                "selector": {"matchLabels": selector(server)},
                "strategy": strategy,
                "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
                "revisionHistoryLimit": spec.rollout.revision_history_limit,
                "paused": False,  # by hand ('kubectl rollout pause') it would hold every rollout, without a word and without a deadline
                "template": revision.template,
            }
        },
    )


def pod_template(server: InferenceServer, settings: Settings) -> Manifest:
    """Of the pods that serve `server`. Raises SpecError when spec.podTemplate cannot be merged."""
    spec, names = server.spec, Names.of(server)
    image = spec.runtime.image or settings.runtime_image
    container, mounts = serverpod.container(serverpod.of_server(server, names.cache_claim), image, settings)
    pod: Manifest = {
        "serviceAccountName": spec.service_account_name or names.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **podspec.NOTHING_OF_THE_HOST,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": spec.drain.termination_grace_period_seconds,
        "securityContext": podspec.pod_security(spec.security),
        "containers": [container],
        "volumes": podspec.volumes(mounts),
        **podspec.placement(spec.scheduling, spec.accelerator, selector(server), spread=True),
    }
    if secrets := podspec.pull_secrets(spec.runtime.image_pull_secrets, settings.image_pull_secrets):
        pod["imagePullSecrets"] = secrets
    metadata: Manifest = {"labels": labels(server)}
    if spec.rollout.refresh is not None:
        metadata["annotations"] = {REFRESH: spec.rollout.refresh}
    template = merged({"metadata": metadata, "spec": pod}, spec.pod_template)
    annotations = {**template["metadata"].get("annotations", {}), SPEC_HASH: revisions.spec_hash(template)}
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


def _pods_service(server: InferenceServer, settings: Settings) -> Manifest:
    """The headless Service: one address a ready pod, for clients and routers that choose a pod themselves."""
    spec = {"clusterIP": "None", "selector": selector(server), "ports": [_port(SERVER_PORT)]}
    name = derived(server.metadata.name, "pods")
    return child(server, settings, api_version="v1", kind="Service", name=name, extra_labels={HEADLESS: "true"}, body={"spec": spec})


def _disruption_budget(server: InferenceServer, settings: Settings) -> Manifest:
    disruption = server.spec.disruption
    spec: Manifest = {
        "selector": {"matchLabels": selector(server)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a pod that serves nobody must not hold up the drain of its node
    }
    if disruption.min_available is not None:
        spec["minAvailable"] = disruption.min_available
    else:
        spec["maxUnavailable"] = 1 if disruption.max_unavailable is None else disruption.max_unavailable
    kind = DISRUPTION_BUDGET
    return child(server, settings, api_version=kind.api_version, kind=kind.kind, name=server.metadata.name, body={"spec": spec})


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
