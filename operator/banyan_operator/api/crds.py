"""The CustomResourceDefinitions, generated from the models. `make crds` writes them to crds/."""

from __future__ import annotations

from typing import Any, Final

import yaml

from banyan_operator.api import schema
from banyan_operator.api.resources import GROUP, KINDS, NAME_RULES, VERSION, Kind

_LABELS: Final = {"app.kubernetes.io/name": "banyan", "app.kubernetes.io/part-of": "banyan"}


def generate(kind: Kind) -> dict[str, Any]:
    """One CustomResourceDefinition as the API server takes it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}", "labels": dict(_LABELS)},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.singular,
                "shortNames": [kind.short],
                "categories": ["banyan"],
            },
            "scope": "Namespaced",
            "versions": [_version(kind)],
        },
    }


def manifests() -> dict[str, str]:
    """File name to YAML text, for every kind."""
    return {f"{GROUP}_{kind.plural}.yaml": _yaml(generate(kind)) for kind in KINDS.values()}


def _version(kind: Kind) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if kind.scale:
        subresources["scale"] = dict(kind.scale)
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": kind.description,
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                    "spec": schema.of_model(kind.spec, "Desired state."),
                    "status": schema.of_model(kind.status, "Observed state."),
                },
                "required": ["spec"],
                "x-kubernetes-validations": schema.rules(NAME_RULES),
            }
        },
        "subresources": subresources,
        "additionalPrinterColumns": [
            {"name": column.name, "type": column.type, "jsonPath": column.path} | ({"priority": column.priority} if column.priority else {})
            for column in kind.columns
        ],
        "selectableFields": [{"jsonPath": ".status.phase"}],
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _yaml(manifest: dict[str, Any]) -> str:
    header = "# Generated from operator/banyan_operator/api by `make crds`. Do not edit.\n"
    return header + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=150, allow_unicode=True)
