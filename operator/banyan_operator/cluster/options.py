"""What the command line and the environment tell `banyan-operator run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

EXIT_CONFIG: Final = 64
SERVICE_HOST: Final = "KUBERNETES_SERVICE_HOST"
"""What the kubelet tells every pod: the address of the API server's Service, which is of the cluster's first family."""


@dataclass(frozen=True)
class Options:
    """What the command line and the environment say."""

    namespaces: tuple[str, ...]
    runtime_image: str
    image_pull_policy: str
    image_pull_secrets: tuple[str, ...]
    namespace: str  # where the operator itself is
    listen: str  # the address on which servers and workers listen in their pods
    lease_namespace: str
    leader_election: bool
    workers: int
    resync_s: float
    host: str  # of the operator's own HTTP
    port: int
    probe_port: int
    log_level: str

    @property
    def leases(self) -> tuple[str, ...]:
        """The namespaces whose lease the leader holds, in the order in which they are taken.

        They follow from what is looked after and not from where the operator is installed, so that of two for the same namespaces
        one leads.
        """
        return tuple(sorted(set(self.namespaces))) or (self.lease_namespace,)


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Flags win over the environment. Ends the process with code 64 where they make no sense."""
    parser = argparse.ArgumentParser(prog="banyan-operator run", description="Run the operator in, or beside, a Kubernetes cluster.")

    def add(flag: str, variable: str, default: str, text: str, read: Callable[[str], Any] = str, metavar: str | None = None) -> None:
        def named(value: str) -> Any:
            try:
                return read(value)
            except ValueError as error:
                where = f"{variable}={value}" if env.get(variable) == value else repr(value)
                raise argparse.ArgumentTypeError(f"{where}: {error}") from None

        help_text = f"{text} [{variable}, default {default or 'none'}]"
        parser.add_argument(flag, default=env.get(variable, default), type=named, metavar=metavar, help=help_text)

    add("--namespaces", "BANYAN_NAMESPACES", "", "namespaces to look after, separated by commas; none: the whole cluster")
    add("--runtime-image", "BANYAN_RUNTIME_IMAGE", "", "image of servers and workers whose spec names none")
    add("--image-pull-policy", "BANYAN_IMAGE_PULL_POLICY", "IfNotPresent", "of that image", *_one_of("Always", "IfNotPresent", "Never"))
    add("--image-pull-secrets", "BANYAN_IMAGE_PULL_SECRETS", "", "Secrets to pull that image with, separated by commas")
    add("--namespace", "POD_NAMESPACE", "default", "where the operator itself runs")
    add("--lease-namespace", "BANYAN_LEASE_NAMESPACE", "kube-system", "where the leader's lease is; with --namespaces: only looked at")
    add("--workers", "BANYAN_WORKERS", "8", "reconciles at a time", _between(int, 1))
    add(
        "--resync-seconds",
        "BANYAN_RESYNC_SECONDS",
        "300",
        "everything is listed again after so long, beside the watches",
        _between(float, 1),
    )
    own = everywhere(env) if env.get(SERVICE_HOST) else "127.0.0.1"  # the kubelet's probes and Prometheus reach a pod's address
    add("--host", "BANYAN_HOST", own, "address of /livez, /readyz and /metrics")
    add("--port", "BANYAN_PORT", "8080", "port of these; 0 takes a free one", _port)
    add("--probe-port", "BANYAN_PROBE_PORT", "0", "port of kopf's own /livez; 0: none", _port)
    add("--log-level", "BANYAN_LOG_LEVEL", "info", "log level", *_one_of("debug", "info", "warning", "error"))
    parser.add_argument("--no-leader-election", action="store_true", help="act at once; only where no other operator runs")
    try:
        args = parser.parse_args(list(argv))
        if not args.runtime_image:
            parser.error("--runtime-image (or BANYAN_RUNTIME_IMAGE) is required: the image that servers and workers run")
        if not args.lease_namespace and not _words(args.namespaces):
            parser.error(
                "--lease-namespace (or BANYAN_LEASE_NAMESPACE) is required without --namespaces: there the lease of the leader lies"
            )
    except SystemExit as stop:
        sys.exit(EXIT_CONFIG if stop.code else 0)
    return Options(
        namespaces=_words(args.namespaces),
        runtime_image=args.runtime_image,
        image_pull_policy=args.image_pull_policy,
        image_pull_secrets=_words(args.image_pull_secrets),
        namespace=args.namespace,
        listen=everywhere(env),
        lease_namespace=args.lease_namespace,
        leader_election=not args.no_leader_election,
        workers=args.workers,
        resync_s=args.resync_seconds,
        host=args.host,
        port=args.port,
        probe_port=args.probe_port,
        log_level=args.log_level,
    )


def everywhere(env: Mapping[str, str]) -> str:
    """Every address of the family that the cluster's pods are reached by; IPv4 where the operator is in no pod and cannot tell."""
    return "::" if ":" in env.get(SERVICE_HOST, "") else "0.0.0.0"


def _one_of(*known: str) -> tuple[Callable[[str], str], str]:
    """How to read one of these words, and how they stand in the help."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return text

    return read, f"{{{','.join(known)}}}"


def _between(kind: type[int] | type[float], least: int, most: int | None = None) -> Callable[[str], float]:
    """How to read a number of these."""
    bounds = f"at least {least}" if most is None else f"between {least} and {most}"

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            raise ValueError(f"must be a {'whole ' if kind is int else ''}number, {bounds}") from None
        if not (number >= least and (most is None or number <= most)):
            raise ValueError(f"must be {bounds}")
        return number

    return read


_port: Final = _between(int, 0, 65535)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
