"""The command line of `banyan-runtime batch`."""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from banyan_runtime.batch.client import base_url
from banyan_runtime.batch.errors import InvalidSpec
from banyan_runtime.batch.lines import ENDPOINTS
from banyan_runtime.batch.retries import RetryPolicy

_EPILOG = "What follows '--' goes to the server that --model-path starts ('banyan-runtime serve --help')."
_ABOUT = (
    "Send the requests of a JSONL file to a server and write output.jsonl, errors.jsonl and, last, manifest.json. "
    "Every input line ends in exactly one of the first two."
)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked."""

    input: str
    output: str
    server: str | None  # one of server and model_path is set
    model_path: str | None
    endpoint: str
    model: str | None
    max_concurrency: int
    api_key_file: str | None
    progress_host: str
    progress_port: int | None
    overwrite: bool
    on_invalid_line: str
    request_timeout: float
    max_attempts: int
    max_backoff: float
    server_timeout: float
    run_id: str
    server_arguments: tuple[str, ...]

    @property
    def policy(self) -> RetryPolicy:
        return RetryPolicy(
            max_attempts=self.max_attempts,
            max_backoff_s=self.max_backoff,
            line_budget_s=max(3600.0, self.request_timeout),
            silence_s=self.server_timeout,
        )

    def api_key(self) -> str | None:
        """The key in --api-key-file. Raises InvalidSpec."""
        if self.api_key_file is None:
            return None
        try:
            key = Path(self.api_key_file).read_text().strip()
        except OSError as error:
            raise InvalidSpec(f"--api-key-file={self.api_key_file}: {error.strerror}") from error
        if not key:
            raise InvalidSpec(f"--api-key-file={self.api_key_file}: the file is empty")
        return key


def parse(argv: Sequence[str]) -> Options:
    """The options of a command line. Raises InvalidSpec."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    words, arguments = words[:cut], tuple(words[cut + 1 :])
    values = vars(_parser().parse_args(words))
    if arguments and values["model_path"] is None:
        raise InvalidSpec("arguments after '--' are for the server that --model-path starts; remove them")
    if values["server"] is not None:
        base_url(values["server"])
    run_id = values.pop("run_id") or os.environ.get("BANYAN_RUN_ID") or uuid.uuid4().hex
    return Options(**values, run_id=run_id, server_arguments=arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidSpec(f"{message}; see 'banyan-runtime batch --help'")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="banyan-runtime batch", allow_abbrev=False, description=_ABOUT, epilog=_EPILOG)

    def add(name: str, metavar: str | None, help: str, **more: object) -> None:
        parser.add_argument(name, metavar=metavar, help=help, **more)  # type: ignore[arg-type]

    add("--input", "URI", "A .jsonl or .jsonl.gz file, or a folder of them: s3://BUCKET/KEY, file:///PATH, a path.", required=True)
    add("--output", "URI", "Folder for the results: s3://BUCKET/PREFIX/, file:///PATH/, a path.", required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="URL", help="A running server, http://HOST:PORT.")
    where.add_argument("--model-path", metavar="DIR", help="Start a server for this model, for this run alone; it answers every line.")
    add("--endpoint", None, "What every line calls. [%(default)s]", default=ENDPOINTS[0], choices=ENDPOINTS)
    add("--model", "NAME", "Model to ask for, in place of the one that a line names.")
    add("--max-concurrency", "N", "Requests in flight, at most. [%(default)s]", type=_number(int, 1, 4096), default=64)
    add("--api-key-file", "FILE", "File that holds the server's API key.")
    add("--progress-host", "HOST", "Address for /progress and /metrics. [%(default)s]", default="127.0.0.1")
    add("--progress-port", "PORT", "Port for /progress and /metrics; 0: a free one. Default: none.", type=_number(int, 0, 65535))
    parser.add_argument("--overwrite", action="store_true", help="Replace the results of an earlier run.")
    add(
        "--on-invalid-line",
        None,
        "What to do with a line that cannot be sent: note it in errors.jsonl, or run nothing. [%(default)s]",
        choices=("record", "fail"),
        default="record",
    )
    seconds = _number(float, 1, 86400)
    add("--request-timeout", "S", "Seconds that one try of a line may take. [%(default)g]", type=seconds, default=1800.0)
    add("--max-attempts", "N", "Tries of a line, not counting 429 and 503. [%(default)s]", type=_number(int, 1, 100), default=5)
    add("--max-backoff", "S", "Longest wait between tries, seconds. [%(default)g]", type=_number(float, 0, 3600), default=60.0)
    add("--server-timeout", "S", "Seconds a server may be stuck in its start, or serve nothing. [%(default)g]", type=seconds, default=600.0)
    add("--run-id", "ID", "Identity of the run; one that has published already ends at once. Default: $BANYAN_RUN_ID, else random.")
    return parser


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} must be between {low:g} and {high:g}")
        return value

    return number
