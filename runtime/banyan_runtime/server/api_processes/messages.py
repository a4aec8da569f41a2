"""What the first process of a server and another API process say to each other, over a link of their own."""

from __future__ import annotations

from typing import Final

import msgspec

from banyan_runtime.exposition import Counted
from banyan_runtime.front.auth import ToldGate
from banyan_runtime.front.metrics import Elsewhere
from banyan_runtime.wire import EngineInfo

# --- first process -> another ---


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The first message. With it comes the connection to the engine."""

    number: int  # of it as the engine's client: from 1 on, never one twice
    processes: int  # how many answer requests, the first included
    config: str  # ServerConfig.engine_json(): no secrets
    gate: ToldGate  # digests of keys, and the internal key
    model_dir: str
    tokenizer_dir: str | None
    info: EngineInfo
    workers: int  # that prepare its requests
    parent: int  # process id of the first process
    first: str  # path of its Unix socket, for requests that are proxied to it


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """With it comes the socket on which all processes of the server listen."""


class Ids(msgspec.Struct, frozen=True, tag="ids"):
    """With it comes the file of `SharedClaims`."""


class State(msgspec.Struct, frozen=True, tag="state"):
    """Of the server: fields of `ServerState`. Whether requests can be prepared each process knows of itself."""

    phase: str
    leaving: bool
    hung: bool
    context_length: int | None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """As `LiveRequests.abort_each`; without ids `abort_all`. What has come here is read first."""

    ids: list[str] | None
    by: str | None


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """Answered by a `HeardAll` when what came before is done."""

    seq: int


class FailOpen(msgspec.Struct, frozen=True, tag="fail"):
    """As `EngineClient.fail_open`."""

    code: str
    message: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The engine is gone, as `EngineClient.died`."""

    message: str


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """Answered by a `Report`."""

    seq: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Every answer is the last of its connection from now on."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Give the answers that are under way, as far as clients take them, and exit 0."""


ToProcess = Open | Listen | Ids | State | Abort | Heard | FailOpen | Died | Tell | Drain | End

# --- another -> first process ---


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Requests can be answered."""


class HeardAll(msgspec.Struct, frozen=True, tag="heard"):
    """All that was said before the `Heard` of this number is done."""

    seq: int


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The engine is not to be reached from here any more."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """How the process is, and what it has counted since its last report."""

    seq: int  # of the newest `Tell`
    under_way: int  # exchanges that are not over, probes left aside
    sought: bool  # some client may still ask here (`Http.sought`)
    sequences: int  # open in the engine
    own: Elsewhere
    counted: list[Counted]


FromProcess = Opened | HeardAll | Closed | Report

encode: Final = msgspec.msgpack.Encoder().encode
to_process: Final = msgspec.msgpack.Decoder(ToProcess)
from_process: Final = msgspec.msgpack.Decoder(FromProcess)
