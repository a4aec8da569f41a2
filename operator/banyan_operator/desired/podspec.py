"""What all our pods have in common: the restricted security profile, volumes, environment, where they may run."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.api import Problem, SpecError
from banyan_operator.api.parts import Accelerator, EnvFrom, EnvVar, ObjectRef, Resources, S3Options, Scheduling, Security
from banyan_operator.plan import Manifest

GROUP_ID: Final = 65532
"""fsGroup where the spec names none: our images run as this user, and Secrets are mounted readable by owner and group only."""
SECRET_MODE: Final = 0o440

POD_FIELDS: Final = {"BANYAN_POD_NAME": "metadata.name", "BANYAN_POD_UID": "metadata.uid", "BANYAN_POD_NAMESPACE": "metadata.namespace"}


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume and where one container sees it."""

    volume: Manifest
    path: str
    read_only: bool = False

    def manifest(self) -> Manifest:
        found: Manifest = {"name": self.volume["name"], "mountPath": self.path}
        if self.read_only:
            found["readOnly"] = True
        return found


def mounts(container_mounts: Iterable[Mount]) -> list[Manifest]:
    return [mount.manifest() for mount in container_mounts]


def volumes(*of_containers: Iterable[Mount]) -> list[Manifest]:
    """The pod's volumes, each once, in the order of their first use."""
    found: dict[str, Manifest] = {}
    for container_mounts in of_containers:
        for mount in container_mounts:
            found.setdefault(mount.volume["name"], mount.volume)
    return list(found.values())


def scratch(name: str, path: str, size: int | str | None = None) -> Mount:
    return Mount({"name": name, "emptyDir": {"sizeLimit": str(size)} if size is not None else {}}, path)


def shared_memory(size: int | str) -> Mount:
    return Mount({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}, "/dev/shm")


def claim(claim_name: str, path: str, *, read_only: bool = False) -> Mount:
    """A claim. The volume is named by it: a pod that lists one claim as two volumes can hang while they are mounted."""
    label = re.match(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", claim_name) and len(claim_name) <= 56
    name = f"claim-{claim_name}" if label else f"claim-{hashlib.sha256(claim_name.encode()).hexdigest()[:8]}"
    return Mount({"name": name, "persistentVolumeClaim": {"claimName": claim_name}}, path, read_only)


def secret_files(name: str, secret: str, path: str, keys: Iterable[str] = ()) -> Mount:
    """Keys of a Secret as files (all of them where none is named); the kubelet renews them when the Secret changes."""
    source: Manifest = {"secretName": secret, "defaultMode": SECRET_MODE}
    if items := [{"key": key, "path": key} for key in keys]:
        source["items"] = items
    return Mount({"name": name, "secret": source}, path, read_only=True)


def config_file(name: str, config_map: str, path: str, key: str, *, optional: bool = False) -> Mount:
    source: Manifest = {"name": config_map, "items": [{"key": key, "path": key}]}
    if optional:
        source["optional"] = True
    return Mount({"name": name, "configMap": source}, path, read_only=True)


# --- environment ---

Environment = dict[str, Manifest]
"""By name, because server-side apply refuses two variables of one name."""


def environment(values: Mapping[str, str], user: Iterable[EnvVar] = ()) -> list[Manifest]:
    """`values`, then who the pod is, then what the user adds (or replaces; BANYAN_ names are refused by the schema)."""
    found: Environment = {name: {"name": name, "value": value} for name, value in values.items()}
    found |= {name: {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in POD_FIELDS.items()}
    found |= {variable.name: variable.dump() for variable in user}
    return list(found.values())


def environment_sources(sources: Iterable[EnvFrom]) -> list[Manifest]:
    return [source.dump() for source in sources]


def escaped(text: str) -> str:
    """An argument in which Kubernetes must not look for $(VARIABLE)."""
    return text.replace("$(", "$$(")


def s3(options: S3Options | None, prefix: str = "") -> tuple[dict[str, str], list[Mount]]:
    """Environment and files that lead to an S3 store. `prefix` sets the volumes apart from those of another store in the same pod."""
    env = dict[str, str]()
    found: list[Mount] = []
    if options is None:
        return env, found
    if options.endpoint:
        env["AWS_ENDPOINT_URL_S3"] = options.endpoint
    if options.region:
        env["AWS_REGION"] = options.region
    if options.force_path_style:
        env["BANYAN_S3_FORCE_PATH_STYLE"] = "true"
    if options.credentials_secret_ref:
        env["BANYAN_S3_CREDENTIALS_DIR"] = "/secrets/s3"
        found.append(secret_files(f"{prefix}s3-credentials", options.credentials_secret_ref.name, "/secrets/s3"))
    if options.ca_config_map_ref:
        env["AWS_CA_BUNDLE"] = f"/config/s3-ca/{options.ca_config_map_ref.key}"
        found.append(config_file(f"{prefix}s3-ca", options.ca_config_map_ref.name, "/config/s3-ca", options.ca_config_map_ref.key))
    return env, found


# --- security ---


NOTHING_OF_THE_HOST: Final[Manifest] = {"hostNetwork": False, "hostPID": False, "hostIPC": False}
"""Said in so many words, as `privileged` is: what nobody says, somebody else may set, and no apply of ours takes it back."""


def pod_security(security: Security) -> Manifest:
    context: Manifest = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": security.fs_group or GROUP_ID,
        "fsGroupChangePolicy": "OnRootMismatch",  # a volume full of weights is not walked at every start
    }
    if security.run_as_user is not None:
        context["runAsUser"] = security.run_as_user
    return context


def container_security(security: Security) -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": security.read_only_root_filesystem,
    }


# --- resources and placement ---


def resources(asked: Resources, accelerator: Accelerator | None = None) -> Manifest:
    """A container's resources. Accelerators cannot be overcommitted, so their request is their limit."""
    found: dict[str, dict[str, str]] = {
        "requests": {name: str(amount) for name, amount in asked.requests.items()},
        "limits": {name: str(amount) for name, amount in asked.limits.items()},
    }
    if accelerator is not None and accelerator.count:
        for amounts in found.values():
            amounts[accelerator.resource_name] = str(accelerator.count)
    return {name: amounts for name, amounts in found.items() if amounts}


_NEEDED_TO_SPREAD: Final = {"maxSkew": "1", "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}


def placement(
    scheduling: Scheduling, accelerator: Accelerator | None, selector: Mapping[str, str], *, spread: bool, path: str = "spec.scheduling"
) -> Manifest:
    """The scheduling part of a pod spec. `spread`: over hosts, where the user does not say how. `path`: where `scheduling` stands.

    Raises SpecError for a constraint without what the API server asks of every one.
    """
    found: Manifest = {}
    if scheduling.node_selector:
        found["nodeSelector"] = dict(scheduling.node_selector)
    tolerations = [toleration.dump() for toleration in scheduling.tolerations]
    names = {toleration.key for toleration in scheduling.tolerations}
    if accelerator is not None and accelerator.count and not names & {accelerator.resource_name, None}:
        # the taint by which nodes with such accelerators are kept for those who ask for them
        tolerations.append({"key": accelerator.resource_name, "operator": "Exists", "effect": "NoSchedule"})
    if tolerations:
        found["tolerations"] = tolerations
    if affinity := _affinity(scheduling.affinity, accelerator, path):
        found["affinity"] = affinity
    constraints = copy.deepcopy(list(scheduling.topology_spread_constraints))
    if not constraints and spread:
        constraints = [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}]
    for number, constraint in enumerate(constraints):
        for field, example in _NEEDED_TO_SPREAD.items():
            if field not in constraint:
                where = f"{path}.topologySpreadConstraints[{number}].{field}"
                raise SpecError([Problem(where, f"is required, for example {example}")])
        constraint.setdefault("labelSelector", {"matchLabels": dict(selector)})
    if constraints:
        found["topologySpreadConstraints"] = constraints
    for key, value in (
        ("priorityClassName", scheduling.priority_class_name),
        ("runtimeClassName", scheduling.runtime_class_name),
        ("schedulerName", scheduling.scheduler_name),
    ):
        if value:
            found[key] = value
    return found


def _affinity(user: dict[str, Any] | None, accelerator: Accelerator | None, path: str) -> dict[str, Any]:
    """With what the accelerator needs. Raises SpecError where the user's is not of the form that it would have to be added to."""
    affinity: dict[str, Any] = copy.deepcopy(user or {})
    wanted: list[Manifest] = []
    if accelerator is not None and accelerator.count:
        if accelerator.products:
            wanted.append({"key": "nvidia.com/gpu.product", "operator": "In", "values": list(accelerator.products)})
        if accelerator.min_memory_mib is not None:
            wanted.append({"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [str(accelerator.min_memory_mib - 1)]})
    if wanted:
        path = f"{path}.affinity"
        nodes = _part(affinity, "nodeAffinity", dict, path)
        path = f"{path}.nodeAffinity"
        required = _part(nodes, "requiredDuringSchedulingIgnoredDuringExecution", dict, path)
        path = f"{path}.requiredDuringSchedulingIgnoredDuringExecution"
        # terms are alternatives, expressions of one term all hold: what the accelerator needs goes into each of the user's terms
        terms = _part(required, "nodeSelectorTerms", list, path) or [{}]
        for number, term in enumerate(terms):
            where = f"{path}.nodeSelectorTerms[{number}]"
            if not isinstance(term, dict):
                raise SpecError([Problem(where, f"{term!r} must be a mapping")])
            term["matchExpressions"] = [*_part(term, "matchExpressions", list, where), *wanted]
        required["nodeSelectorTerms"] = terms
    return affinity


def _part(whole: dict[str, Any], name: str, kind: type[dict[str, Any] | list[Any]], path: str) -> Any:
    """The mapping or list of that name, made where it is not there. Raises SpecError where it is something else."""
    if whole.get(name) is None:
        whole[name] = kind()
    if not isinstance(whole[name], kind):
        raise SpecError([Problem(f"{path}.{name}", f"{whole[name]!r} must be a {'mapping' if kind is dict else 'list'}")])
    return whole[name]


def pull_secrets(*lists: Iterable[ObjectRef | str]) -> list[Manifest]:
    names = dict.fromkeys(item if isinstance(item, str) else item.name for group in lists for item in group)
    return [{"name": name} for name in names]
