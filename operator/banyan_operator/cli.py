"""`banyan-operator run | local | status | crds | version`. Each command imports only what it needs."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from banyan_operator import __version__

EXIT_USAGE = 64
EXIT_GONE = 69
EXIT_UNMADE = 73
EXIT_LATER = 75
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""What a shell makes of SIGINT and SIGPIPE."""
POLL_S = 0.2
START_S = 10.0
"""How long `status --wait` gives an operator that was started beside it until it shows itself."""


class _Parser(argparse.ArgumentParser):
    """argparse with the exit code of sysexits for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. An interrupt and a reader that leaves end it as they end any other command."""
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        from banyan_operator.local.view import forget

        forget(sys.stdout)
        return EXIT_UNREAD


def _main(words: Sequence[str]) -> int:
    if words[:1] == ["run"]:  # it parses its own options: they come from the environment too
        # As process 1 of a container we would not hear a SIGTERM at all until the operator listens to it, seconds of imports later.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        from banyan_operator.cluster.app import main as run

        return run(words[1:])
    parser = _parser()
    options = parser.parse_args(words)
    match options.command:
        case "local":
            return _local(options)
        case "status":
            return _status(options)
        case "crds":
            return _crds(options)
        case "version":
            print(__version__)
            return 0
    parser.print_help()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="banyan-operator", description="Brings InferenceServers and BatchJobs about: on Kubernetes, or on this machine.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    commands.add_parser("run", help="work as the operator of a Kubernetes cluster", add_help=False)

    local = commands.add_parser("local", help="run manifests as processes on this machine")
    local.add_argument(
        "-f",
        "--filename",
        action="append",
        required=True,
        type=Path,
        metavar="DIR_OR_FILE",
        help="manifests (several times for more); edits are taken over",
    )
    local.add_argument("--state-dir", type=Path, metavar="DIR", help="status, logs and volumes [~/.local/state/banyan/NAME-HASH]")
    local.add_argument("--volume", action="append", default=[], metavar="CLAIM=DIR", help="the folder that pvc://CLAIM stands for")
    local.add_argument("--secret", action="append", default=[], metavar="NAME=DIR", help="a Secret from a folder with a file for each key")
    local.add_argument(
        "--until-done",
        "--once",
        action="store_true",
        help="stop when all servers were ready and all BatchJobs have ended; exit code 1 if one failed",
    )
    local.add_argument("--fresh", action="store_true", help="forget which BatchJobs ran, finished or not: they begin anew")
    local.add_argument("--plain", action="store_true", help="print lines, also on a terminal")

    status = commands.add_parser("status", help="show what runs on this machine, as 'kubectl get' does")
    status.add_argument("--state-dir", type=Path, metavar="DIR", help="of which local mode [the one that runs]")
    status.add_argument("-o", "--output", choices=("wide", "json", "yaml"), help="more columns, or the whole objects")
    status.add_argument("--wait", choices=("ready", "done"), help="show progress until all servers are ready, or all BatchJobs done too")
    status.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of --wait; then exit code 75 [600]")
    status.add_argument("--plain", action="store_true", help="print lines while waiting, also on a terminal")

    crds = commands.add_parser("crds", help="print the CustomResourceDefinitions")
    crds.add_argument("--output-dir", type=Path, metavar="DIR", help="write a file for each instead")
    commands.add_parser("version", help="print the version")
    return parser


def _local(options: argparse.Namespace) -> int:
    from banyan_operator.local import app
    from banyan_operator.local.errors import LocalError
    from banyan_operator.local.view import view_for

    try:
        local = app.Options(
            manifests=options.filename,
            state_dir=options.state_dir,
            volumes=_pairs("--volume", options.volume),
            secrets=_pairs("--secret", options.secret),
            until_done=options.until_done,
            fresh=options.fresh,
        )
        return app.run(local, view_for(sys.stdout, plain=options.plain, hint="Ctrl-C stops everything"))
    except LocalError as error:
        return _refuse(str(error), error.exit_code)


def _pairs(flag: str, words: Sequence[str]) -> dict[str, Path]:
    """['a=/x'] → {'a': Path('/x')}, absolute and existing."""
    from banyan_operator.local.errors import LocalError

    found: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder):
            raise LocalError(f"{flag} {word}: write NAME=DIR")
        if not Path(folder).is_dir():
            raise LocalError(f"{flag} {word}: {folder} is no folder")
        found[name] = Path(folder).resolve()
    return found


def _status(options: argparse.Namespace) -> int:
    from banyan_operator.local.errors import LocalError, NotRunningError
    from banyan_operator.local.state import Snapshot, only_running

    try:
        if options.wait:
            return _wait(options)
        snapshot = Snapshot.read(options.state_dir or only_running())
    except (LocalError, NotRunningError) as error:
        return _refuse(str(error), error.exit_code)
    if options.output in ("json", "yaml"):
        listed = {"apiVersion": "v1", "kind": "List", "items": list(snapshot.resources)}
        if options.output == "json":
            import json

            print(json.dumps(listed, indent=2))
        else:
            import yaml

            print(yaml.safe_dump(listed, sort_keys=False), end="")
        return 0
    from banyan_operator.local.table import render

    print(render(snapshot.resources, wide=options.output == "wide", now=time.time()))
    if snapshot.state != "running":
        print(f"(as it was; the operator is {snapshot.state})", file=sys.stderr)
    return 0


def _wait(options: argparse.Namespace) -> int:
    """Show progress until what is waited for is there (0) or failed (1); 69 when the operator ends, 75 when time runs out."""
    from banyan_operator.local.errors import NotRunningError
    from banyan_operator.local.prospect import all_done, servers_ready
    from banyan_operator.local.state import Snapshot, only_running, state_home
    from banyan_operator.local.view import view_for

    over_when = servers_ready if options.wait == "ready" else all_done
    began = time.monotonic()
    deadline = began + options.timeout
    seen_running = False
    with view_for(sys.stdout, plain=options.plain) as view:
        while time.monotonic() < deadline:
            try:
                snapshot = Snapshot.read(options.state_dir or only_running())
                seen_running = seen_running or snapshot.state != "stopped"
                if not seen_running:
                    raise NotRunningError("nothing runs, what is there is of an earlier run; start it with 'banyan-operator local -f DIR'")
            except NotRunningError:
                if time.monotonic() - began >= START_S:
                    raise
                # It may be about to start.
                time.sleep(POLL_S)
                continue
            view.show(snapshot)
            if view.gone:
                return EXIT_UNREAD
            prospect = over_when(snapshot.resources)
            if prospect.over:
                for problem in prospect.problems:
                    view.say(problem)
                return 1 if prospect.problems else 0
            if snapshot.state == "stopped":
                return _refuse("the operator has ended; its log tells why", EXIT_GONE)
            time.sleep(POLL_S)
    if not seen_running:
        where = f"in {options.state_dir}" if options.state_dir else f"below {state_home()}"
        return _refuse(f"no local mode runs {where}; start it with 'banyan-operator local -f DIR'", EXIT_GONE)
    return _refuse(f"not {options.wait} after {options.timeout:g} s; 'banyan-operator status' shows how far it is", EXIT_LATER)


def _crds(options: argparse.Namespace) -> int:
    from banyan_operator.api.crds import manifests

    if options.output_dir is None:
        print("".join(f"---\n{text}" for text in manifests().values()), end="")
        return 0
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        for name, text in manifests().items():
            (options.output_dir / name).write_text(text)
    except OSError as error:
        return _refuse(f"--output-dir={options.output_dir}: cannot be written ({(error.strerror or str(error)).lower()})", EXIT_UNMADE)
    return 0


def _refuse(message: str, code: int) -> int:
    print(f"banyan-operator: {message}", file=sys.stderr)
    return code
