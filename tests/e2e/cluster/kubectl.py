"""kubectl, as the tests use it: one object for each namespace."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

IN_CLUSTER_NETWORK = bool(os.environ.get("BANYAN_TEST_IN_CLUSTER_NETWORK"))
"""Whether Service names lead somewhere from here; else `kubectl port-forward` does."""

Manifest = dict[str, Any]


class KubectlError(Exception):
    """kubectl said no; the text is what it wrote."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl in one namespace."""

    namespace: str

    def __call__(self, *args: str, stdin: str | bytes | None = None, timeout: float = 60) -> str:
        """Run it and return what it prints. Raises KubectlError with its message."""
        done = subprocess.run(
            ["kubectl", "--namespace", self.namespace, *args],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=timeout,
        )
        if done.returncode:
            raise KubectlError(done.stderr.decode().strip() or done.stdout.decode().strip())
        return done.stdout.decode()

    def apply(self, *manifests: Manifest) -> str:
        return self("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)}))

    def get(self, what: str, *, selector: str = "") -> Manifest:
        """One object (KIND/NAME), or a list of a kind."""
        got: Manifest = json.loads(self("get", what, "-o", "json", *(["-l", selector] if selector else [])))
        return got

    def find(self, what: str) -> Manifest | None:
        """One object, or None where there is none."""
        try:
            return self.get(what)
        except KubectlError as error:
            if "not found" in str(error):
                return None
            raise

    def items(self, kind: str, selector: str = "") -> list[Manifest]:
        found: list[Manifest] = self.get(kind, selector=selector)["items"]
        return found

    def patch(self, what: str, patch: Manifest) -> str:
        return self("patch", what, "--type=merge", "-p", json.dumps(patch))

    def until(self, what: str, holds: Callable[[Manifest], Any], timeout_s: float = 60) -> Manifest:
        """Wait until an object is there and `holds`; the object's last state stands in the failure."""
        deadline = time.monotonic() + timeout_s
        last: Manifest | None = None
        while time.monotonic() < deadline:
            last = self.find(what)
            if last is not None and holds(last):
                return last
            time.sleep(0.3)
        raise AssertionError(
            f"waited {timeout_s:.0f} s in vain for {what}; it is {json.dumps(last and last.get('status'), indent=1)}\n{self._why()}"
        )

    def gone(self, what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while self.find(what) is not None:
            assert time.monotonic() < deadline, f"{what} is still there after {timeout_s:.0f} s"
            time.sleep(0.3)

    def pods_left(self, selector: str, count: int, timeout_s: float = 60) -> None:
        """Wait until only so many pods are left."""
        deadline = time.monotonic() + timeout_s
        while len(pods := self.items("pods", selector)) > count:
            names = [pod["metadata"]["name"] for pod in pods]
            assert time.monotonic() < deadline, f"{names} are still there after {timeout_s:.0f} s"
            time.sleep(0.3)

    @contextlib.contextmanager
    def url(self, service: str) -> Iterator[str]:
        """A base URL of a Service's first port."""
        if IN_CLUSTER_NETWORK:
            port = self.get(f"service/{service}")["spec"]["ports"][0]["port"]
            yield f"http://{service}.{self.namespace}:{port}"
            return
        port = self.get(f"service/{service}")["spec"]["ports"][0]["port"]
        command = ["kubectl", "--namespace", self.namespace, "port-forward", f"service/{service}", f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
                assert found, "kubectl port-forward did not start"
                yield f"http://127.0.0.1:{found[1]}"
            finally:
                process.terminate()

    def page(self, service: str, path: str, timeout_s: float = 30) -> str:
        """What a Service answers. Its pods may be others since a moment ago, which nodes learn no sooner than whoever asks here."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with self.url(service) as url, urllib.request.urlopen(url + path, timeout=10) as page:
                    text: str = page.read().decode()
                    return text
            except OSError:
                assert time.monotonic() < deadline, f"{service} does not answer"
                time.sleep(0.1)

    def _why(self) -> str:
        with contextlib.suppress(KubectlError):
            return self("get", "pods,events", "-o", "wide")
        return ""


def condition(resource: Manifest, type_: str) -> Manifest:
    """A condition of a resource; {} where it has none of that type."""
    conditions = (resource.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == type_), {})


def is_true(type_: str) -> Callable[[Manifest], bool]:
    return lambda resource: bool(condition(resource, type_).get("status") == "True" and _current(resource))


def reason(type_: str, wanted: str) -> Callable[[Manifest], bool]:
    return lambda resource: bool(condition(resource, type_).get("reason") == wanted and _current(resource))


def phase(*wanted: str) -> Callable[[Manifest], bool]:
    return lambda resource: (resource.get("status") or {}).get("phase") in wanted and _current(resource)


def _current(resource: Manifest) -> bool:
    """Whether the status speaks of the spec as it is now."""
    return bool((resource.get("status") or {}).get("observedGeneration") == resource["metadata"].get("generation"))
