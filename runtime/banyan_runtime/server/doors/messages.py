"""What the front and its doors say to each other, over a link of their own for each door."""

from __future__ import annotations

from typing import Final

import msgspec

from banyan_runtime.exposition import Counted
from banyan_runtime.front.auth import ToldGate
from banyan_runtime.front.metrics import Elsewhere
from banyan_runtime.wire import EngineInfo

# --- front -> door ---


class Open(msgspec.Struct, frozen=True, tag="open"):
    """What a door is told first. With it comes its connection to the engine."""

    number: int  # of it as the engine's client: from 1 on, never one twice
    doors: int  # how many there are
    config: str  # ServerConfig.engine_json(): no secrets
    gate: ToldGate  # digests of keys, and the internal key
    model_dir: str
    tokenizer_dir: str | None
    tokenizer: bytes | None  # as the process that forks has loaded it; None: there is none
    info: EngineInfo
    workers: int  # that prepare its requests
    parent: int  # process id of the front


class Ids(msgspec.Struct, frozen=True, tag="ids"):
    """With it comes the file of `SharedClaims`."""


class State(msgspec.Struct, frozen=True, tag="state"):
    """Of the server: fields of `ServerState`. Whether requests can be prepared each process knows of itself."""

    phase: str
    leaving: bool
    hung: bool
    context_length: int | None


class Take(msgspec.Struct, frozen=True, tag="take"):
    """A connection, which comes with this message, and what has been read of its next request. Answered by a `Taken`."""

    begun: bytes


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


ToDoor = Open | Ids | State | Take | Abort | Heard | FailOpen | Died | Tell | Drain | End

# --- door -> front ---


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Connections may come."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """As many `Take`s have come as `Taken`s were said."""

    connections: int  # open now, with this one


class Lack(msgspec.Struct, frozen=True, tag="lack"):
    """Why no request can be prepared here; "" when one can again."""

    why: str


class HeardAll(msgspec.Struct, frozen=True, tag="heard"):
    """All that was said before the `Heard` of this number is done."""

    seq: int


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The engine is not to be reached from here any more: nothing is to be given to this door."""


class Back(msgspec.Struct, frozen=True, tag="back"):
    """As `Take`, the other way: this request is the front's to answer."""

    begun: bytes


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """A worker is to be forked; with the message comes its end of the socket to it."""


class Unforked(msgspec.Struct, frozen=True, tag="unforked"):
    """A worker that was asked for has not come."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """How a door is, and what it has counted since its last report."""

    seq: int  # of the newest `Tell`
    connections: int  # open
    under_way: int  # exchanges that are not over, probes left aside
    sought: bool  # some client may still ask here (`Http.sought`)
    sequences: int  # open in the engine
    own: Elsewhere
    counted: list[Counted]


FromDoor = Opened | Taken | Lack | HeardAll | Closed | Back | Fork | Unforked | Report

encode: Final = msgspec.msgpack.Encoder().encode
to_door: Final = msgspec.msgpack.Decoder(ToDoor)
from_door: Final = msgspec.msgpack.Decoder(FromDoor)
