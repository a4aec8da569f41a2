"""A mirror of the Python package index for pods that have no way to the real one, as an administrator would set one up."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.cluster.kubectl import Kubectl, Manifest

NAME = "banyan-test-mirror"


@contextlib.contextmanager
def mirror(wheels: Path, address: str, kubectl: Kubectl) -> Iterator[None]:
    """Serve a folder of wheels at `address`, and have the API server point pip in every pod of the namespace to it."""
    handler = functools.partial(_Quiet, directory=str(wheels))
    with http.server.ThreadingHTTPServer((address, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"http://{address}:{server.server_port}/", "PIP_TRUSTED_HOST": address}
        kubectl.apply(*_policy(kubectl.namespace, variables))
        try:
            yield
        finally:
            kubectl("delete", f"mutatingadmissionpolicybinding/{NAME}", f"mutatingadmissionpolicy/{NAME}")
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def _policy(namespace: str, variables: dict[str, str]) -> list[Manifest]:
    """Environment variables for all containers of a namespace's pods, added at admission: nobody's manifest changes."""
    env = ", ".join(f'Object.spec.containers.env{{name: "{name}", value: "{value}"}}' for name, value in variables.items())
    containers = f"object.spec.containers.map(c, Object.spec.containers{{name: c.name, env: [{env}]}})"
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicy",
            "metadata": {"name": NAME},
            "spec": {
                "failurePolicy": "Fail",
                "reinvocationPolicy": "Never",
                "matchConstraints": {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                    "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
                },
                "mutations": [
                    {
                        "patchType": "ApplyConfiguration",
                        "applyConfiguration": {"expression": f"Object{{spec: Object.spec{{containers: {containers}}}}}"},
                    }
                ],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": {"name": NAME},
            "spec": {"policyName": NAME},
        },
    ]
