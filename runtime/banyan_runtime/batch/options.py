"""The command line of `banyan-runtime batch`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from banyan_runtime.batch.client import base_url
from banyan_runtime.batch.documents import Reason
from banyan_runtime.batch.errors import InvalidSpec
from banyan_runtime.batch.lines import ENDPOINTS
from banyan_runtime.batch.order import Pace
from banyan_runtime.batch.planner import Cut
from banyan_runtime.batch.retries import RetryPolicy

PHASES: Final = ("all", "plan", "work", "merge")
REASONS: Final[tuple[Reason, ...]] = ("cancelled", "expired", "failed", "too-many-errors")
GRACE_S: Final = 30.0
_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EPILOG = "What follows '--' goes to the server that --model-path starts ('banyan-runtime serve --help')."
_ABOUT = (
    "Send the requests of a JSONL file to a server and write output.jsonl, errors.jsonl and, last, manifest.json. "
    "Every input line ends in exactly one of the first two."
)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked."""

    input: str | None  # one of input and retry_failed is set
    retry_failed: str | None
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
    storage_timeout: float
    run_id: str | None
    phase: str
    partial: Reason | None
    workers: int
    shard_requests: int
    shard_bytes: int
    lease_seconds: float
    checkpoint_seconds: float
    max_error_percent: int
    priority: int | None
    allow_unfenced: bool
    grace_s: float  # between SIGTERM and the end
    server_arguments: tuple[str, ...]

    @property
    def policy(self) -> RetryPolicy:
        return RetryPolicy(
            max_attempts=self.max_attempts,
            max_backoff_s=self.max_backoff,
            busy_s=max(3600.0, self.request_timeout),
            silence_s=self.server_timeout,
        )

    @property
    def cut(self) -> Cut:
        return Cut(self.shard_requests, self.shard_bytes, self.workers)

    @property
    def pace(self) -> Pace:
        return Pace(
            max_concurrency=self.max_concurrency,
            checkpoint_s=self.checkpoint_seconds,
            lease_s=self.lease_seconds,
            workers=self.workers,
        )

    def api_key(self) -> str | None:
        """The key in --api-key-file. Raises InvalidSpec."""
        if self.api_key_file is None:
            return None
        try:
            key = Path(self.api_key_file).read_text().strip()
        except OSError as error:
            raise self._no_key(str(error.strerror)) from error
        except UnicodeDecodeError as error:
            raise self._no_key("it holds no text, so no key") from error
        if not key:
            raise self._no_key("the file is empty")
        if any(character.isspace() for character in key):  # a server's own file, perhaps: names and keys
            raise self._no_key("it holds more than a key; give a file that holds the key alone")
        return key

    def _no_key(self, message: str) -> InvalidSpec:
        return InvalidSpec(message, field="--api-key-file", value=self.api_key_file)

    def key_now(self) -> str | None:
        """What --api-key-file says by now; None where that cannot be told, as of a pipe, which is read but once."""
        if self.api_key_file is None or not Path(self.api_key_file).is_file():
            return None
        with contextlib.suppress(InvalidSpec):
            return self.api_key()
        return None


def parse(argv: Sequence[str]) -> Options:
    """The options of a command line. Raises InvalidSpec."""
    words = list(argv)
    for word in words:
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in word):
            message = "an argument must be UTF-8; what is read and written under this name could not be named in the results"
            raise InvalidSpec(message, value=ascii(word))
    cut = words.index("--") if "--" in words else len(words)
    words, arguments = words[:cut], tuple(words[cut + 1 :])
    values = vars(_parser().parse_args(words))
    if arguments and values["model_path"] is None:
        raise InvalidSpec("arguments after '--' are for the server that --model-path starts; remove them")
    if values["server"] is not None:
        base_url(values["server"])
    for name in ("input", "output", "retry_failed"):
        if values[name] == "":
            raise InvalidSpec("the path is empty", field=f"--{name.replace('_', '-')}")
    needs_server = values["phase"] in ("all", "work")
    if needs_server and values["server"] is None and values["model_path"] is None:
        raise InvalidSpec("it sends requests: give --server or --model-path", field="--phase", value=values["phase"])
    if values["partial"] is not None and values["phase"] != "merge":
        raise InvalidSpec("it belongs to --phase=merge", field="--partial", value=values["partial"])
    if values["allow_unfenced"] and values["workers"] > 1:
        raise InvalidSpec("a storage without conditional writes bears one worker", field="--workers", value=values["workers"])
    run_id = values.pop("run_id") or os.environ.get("BANYAN_RUN_ID") or None
    if run_id is not None and not _RUN_ID.fullmatch(run_id):
        message = "letters, digits, '.', '_' and '-', 64 at most, beginning with a letter or digit"
        raise InvalidSpec(message, field="--run-id", value=run_id)
    return Options(**values, run_id=run_id, grace_s=_grace(os.environ.get("BANYAN_GRACE_SECONDS")), server_arguments=arguments)


def _grace(text: str | None) -> float:
    try:
        return min(86400.0, max(2.0, float(text))) if text else GRACE_S
    except ValueError:
        raise InvalidSpec("must be a number of seconds", field="BANYAN_GRACE_SECONDS", value=text) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidSpec(message, hint="see 'banyan-runtime batch --help'")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="banyan-runtime batch", allow_abbrev=False, description=_ABOUT, epilog=_EPILOG)

    def add(name: str, metavar: str | None, help: str, **more: object) -> None:
        parser.add_argument(name, metavar=metavar, help=help, **more)  # type: ignore[arg-type]

    what = parser.add_mutually_exclusive_group(required=True)
    files = "A .jsonl or .jsonl.gz file, or a folder of them: s3://BUCKET/KEY, file:///PATH, a path."
    what.add_argument("--input", metavar="URI", help=files)
    failed = "Output folder of a finished run, whose failed lines run again; the new output holds what succeeded in either."
    what.add_argument("--retry-failed", metavar="URI", help=failed)
    add("--output", "URI", "Folder for the results: s3://BUCKET/PREFIX/, file:///PATH/, a path.", required=True)
    where = parser.add_mutually_exclusive_group()
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
    add("--storage-timeout", "S", "Seconds the storage may be away. [%(default)g]", type=seconds, default=600.0)
    add(
        "--run-id",
        "ID",
        "Identity of the run: all who give it work together, and one that has published ends at once. Default: $BANYAN_RUN_ID, else a new "
        "one, or that of the run which the same command has left unfinished.",
    )
    add(
        "--phase",
        None,
        "Which part of a run to do: count and cut the input, send lines, publish. [%(default)s]",
        choices=PHASES,
        default="all",
    )
    add("--partial", None, "With --phase merge: end what is unfinished first, and say this of it.", choices=REASONS)
    several = "How many processes will work on the run, so that there are shards for all; starts none: give each --run-id. [%(default)s]"
    add("--workers", "N", several, type=_number(int, 1, 1000), default=1)
    add("--shard-requests", "N", "Lines of a shard, at most. [%(default)s]", type=_number(int, 1, 1_000_000), default=1000)
    add("--shard-bytes", "N", "Bytes of a shard, about. [%(default)s]", type=_number(int, 65536, 1 << 30), default=64 << 20)
    add(
        "--lease-seconds",
        "S",
        "A worker that was not heard of for so long loses its shards. [%(default)g]",
        type=_number(float, 1, 3600),
        default=60.0,
    )
    add(
        "--checkpoint-seconds",
        "S",
        "Finished lines are in S3 after so long, at most. [%(default)g]",
        type=_number(float, 0.1, 600),
        default=15.0,
    )
    percent = "Share of failed lines beyond which the run ends; 100: never. [%(default)s]"
    add("--max-error-percent", "P", percent, type=_number(int, 0, 100), default=100)
    add("--priority", "N", "Priority of each request that names none. Default: none is added.", type=_number(int, -100, 100))
    parser.add_argument("--allow-unfenced", action="store_true", help="Accept a storage that ignores the conditions of writes.")
    return parser


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} must be between {low:g} and {high:g}")
        return value

    return number
