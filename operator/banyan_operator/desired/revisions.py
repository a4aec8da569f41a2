"""What the pods of a server run: decided once for each spec, and recorded.

An operator of another version would render the same spec otherwise: another default image, pull policy, pull secret, layout.
None of that may restart a pod that holds a GPU. So the pod template that was rendered for a spec is kept as a ControllerRevision,
and used as it is for as long as pods are to be of that spec. Only a change of what pods see in the spec makes another one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.api import InferenceServer
from banyan_operator.desired import podspec
from banyan_operator.desired.metadata import SPEC_DIGEST, SPEC_HASH, child, digest, owner
from banyan_operator.desired.names import derived
from banyan_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, Manifest
from banyan_operator.kube.objects import Ref, find_object
from banyan_operator.plan import Settings

NOT_IN_PODS: Final[dict[str, Any]] = {
    "replicas": True,
    "service": True,
    "ingress": True,
    "disruption": True,
    "metrics": True,
    "network_policy": True,
    "paused": True,
    "rollout": {"strategy", "max_surge", "max_unavailable", "progress_deadline_seconds", "revision_history_limit"},  # but not refresh
    "cache": {"retain", "storage_class_name", "access_mode"},  # of the claim
}
"""The fields of a server's spec that do not reach its pods."""

_RESTARTED: Final = "kubectl.kubernetes.io/restartedAt"


@dataclass(frozen=True, slots=True)
class Revision:
    """A pod template, and for which spec it was decided."""

    spec_digest: str
    template: Manifest
    records: tuple[Manifest, ...]
    """The ControllerRevisions that are to exist: its own, and those of earlier specs that are kept."""


def spec_digest(server: InferenceServer) -> str:
    """10 hex digits over what pods see of the spec.

    Defaults are left out, so that a schema which adds or drops a field with a default says the same of the same spec.
    """
    spec = server.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=NOT_IN_PODS)
    if server.spec.cache.type != "EmptyDir":
        spec.get("cache", {}).pop("size", None)  # a claim may grow under its pods
    return digest({field: value for field, value in spec.items() if value != {}})


def decided(server: InferenceServer, children: Iterable[Manifest]) -> Manifest | None:
    """The pod template that is recorded for the spec, or None where one has yet to be rendered."""
    known, wanted = tuple(children), spec_digest(server)
    for record in _records(server, known):
        if (record["metadata"].get("labels") or {}).get(SPEC_DIGEST) == wanted:
            template: Manifest = record["data"]["template"]
            return template
    live = find_object(known, Ref.to(DEPLOYMENT, server.metadata.name))
    return adopted(live) if live is not None and _runs(live, server, wanted) else None


def revision(server: InferenceServer, settings: Settings, children: Iterable[Manifest], template: Manifest) -> Revision:
    """`template`, which was decided for the spec before or is now, and the records that are to exist."""
    wanted, records = spec_digest(server), _records(server, children)
    name = derived(server.metadata.name, spec_hash(template))  # what it holds can never change, so it is named by that
    kept = next((one for one in records if one["metadata"]["name"] == name), None)
    last = max((one["revision"] for one in records), default=0)
    number = kept["revision"] if kept is not None and kept["revision"] == last else last + 1
    record = _record(server, settings, name, wanted, template, number)
    earlier = [one for one in records if one is not kept][: server.spec.rollout.revision_history_limit]
    return Revision(wanted, template, (record, *(_owned(server, settings, one) for one in earlier)))


def _record(server: InferenceServer, settings: Settings, name: str, of_spec: str, template: Manifest, number: int) -> Manifest:
    return child(
        server,
        settings,
        api_version=CONTROLLER_REVISION.api_version,
        kind=CONTROLLER_REVISION.kind,
        name=name,
        extra_labels={SPEC_DIGEST: of_spec},
        body={"data": {"template": template}, "revision": number},
    )


def _owned(server: InferenceServer, settings: Settings, kept: Manifest) -> Manifest:
    """An earlier record as it is, or as it is to be again where it lost its owner."""
    if owner(server).controls(kept):
        return kept
    of_spec = kept["metadata"]["labels"].get(SPEC_DIGEST, "")
    return _record(server, settings, kept["metadata"]["name"], of_spec, kept["data"]["template"], kept["revision"])


def adopted(live: Manifest) -> Manifest:
    """The pod template of a live Deployment, without what only the API server filled in."""
    template: Manifest = _without_defaults(copy.deepcopy(live["spec"]["template"]))
    template["spec"].pop("serviceAccount", None)  # another name of serviceAccountName
    template["spec"] = {**podspec.NOTHING_OF_THE_HOST, **template["spec"]}  # which the API server drops
    return template


def _records(server: InferenceServer, children: Iterable[Manifest]) -> list[Manifest]:
    """Templates that were recorded, those used last first; also those that lost their owner."""
    mine = owner(server)
    ours = (one for one in children if one["kind"] == CONTROLLER_REVISION.kind and mine.may_change(one))
    found = [one for one in ours if "template" in (one.get("data") or {}) and not one["metadata"].get("deletionTimestamp")]
    return sorted(found, key=lambda one: (one["revision"], one["metadata"]["name"]), reverse=True)


def _runs(live: Manifest, server: InferenceServer, wanted: str) -> bool:
    """Whether the Deployment's template is the one that was rendered for the spec as it is."""
    annotations = live["metadata"].get("annotations") or {}
    return bool(annotations.get(SPEC_DIGEST) == wanted) and owner(server).may_change(live) and _untouched(live)


def _untouched(live: Manifest) -> bool:
    """Whether the template is as it was written: what somebody else put into it since must not be recorded as decided."""
    template = adopted(live)
    annotations = template["metadata"].get("annotations") or {}
    annotations.pop(_RESTARTED, None)
    return spec_hash(template) == annotations.get(SPEC_HASH)


def spec_hash(template: Manifest) -> str:
    """The hash that tells this template's pods from those of others; without itself, which its annotations may hold, and without what
    the API server drops: that nothing of the host is shared."""
    annotations = {name: value for name, value in (template["metadata"].get("annotations") or {}).items() if name != SPEC_HASH}
    metadata = {name: value for name, value in template["metadata"].items() if name != "annotations"}
    spec = {name: value for name, value in template["spec"].items() if value or name not in podspec.NOTHING_OF_THE_HOST}
    return digest({**template, "metadata": {**metadata, "annotations": annotations} if annotations else metadata, "spec": spec})


_API_DEFAULTS: Final[dict[str, Any]] = {
    "creationTimestamp": None,
    "defaultMode": 0o644,
    "dnsPolicy": "ClusterFirst",
    "resources": {},
    "scheme": "HTTP",
    "schedulerName": "default-scheduler",
    "successThreshold": 1,
    "terminationMessagePath": "/dev/termination-log",
}
"""What the API server fills into a pod template. To leave such a field out, or to write it, is the same."""
_NAMED_BY_USERS: Final = frozenset({"labels", "annotations", "matchLabels", "nodeSelector"})


def _without_defaults(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {
        key: item if key in _NAMED_BY_USERS else _without_defaults(item)
        for key, item in value.items()
        if key not in _API_DEFAULTS or item != _API_DEFAULTS[key]
    }
    if found.keys() == {"apiVersion", "fieldPath"} and found["apiVersion"] == "v1":
        del found["apiVersion"]
    return found
