"""What a run keeps in storage beside its results: whose an output is, the plan, and the state of each shard.

Small JSON objects, each written on the condition that it is as it was read. Everything here can be read by the next release: unknown
fields are ignored, new ones have defaults.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from banyan_runtime.batch.records import InputFile, Outcome, Usage, decoded, known
from banyan_runtime.storage.store import Damaged

FOLDER: Final = ".banyan"  # below the output; holds everything of all runs that wrote there
OWNER: Final = f"{FOLDER}/owner.json"

__all__ = ["FOLDER", "OWNER", "Completes", "InputObject", "Keys", "Outcome", "Owner", "Part", "Plan", "Reason", "Shard", "State", "Stop"]

Reason = Literal["cancelled", "expired", "failed", "too-many-errors"]
_ANEW: Final = f"restore it; or choose another output; or remove {FOLDER}/ below this one, and all begins anew"
_encoder = msgspec.json.Encoder()


class Keys:
    """Where the objects of one run lie, below its output."""

    def __init__(self, run: str) -> None:
        self.folder = f"{FOLDER}/{run}/"
        self.plan = self.folder + "plan.json"
        self.stop = self.folder + "stop.json"

    def state(self, shard: int) -> str:
        return f"{self.folder}shards/{shard:06}.json"

    def part(self, shard: int, epoch: int, seq: int, nonce: str) -> str:
        """A name that no other write can have, so a part is never written twice."""
        return f"{self.folder}parts/{shard:06}-{epoch}-{seq}-{nonce}.records"


@known
class Owner(msgspec.Struct, frozen=True, rename="camel"):
    """owner.json: the run to which an output belongs."""

    run: str
    nonce: str
    digest: str = ""  # of what the run was asked to do
    holder: str | None = None  # who began it or took it up last; None: it was left in good order
    started_at: str = ""  # RFC 3339, UTC
    overwrite: bool = False  # what other runs left here may be replaced
    finished: bool = False  # its results were published, and its parts may be gone
    previous: list[str] = []  # runs that were displaced with --overwrite, the latest first; what they still write may be replaced
    damaged: bool = False  # its results could not be made of its parts: who may overwrite begins anew, others try again

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes) -> Owner:
        """Raises Damaged, as all documents do."""
        return decoded(data, Owner, OWNER, _ANEW)


class InputObject(msgspec.Struct, frozen=True, rename="camel"):
    """One object of the input, at the version that the plan was made for."""

    key: str
    uri: str
    tag: str
    bytes: int
    sha256: str = ""  # by which a copy is known, whose tag is another; "": not known

    @staticmethod
    def of(file: InputFile) -> InputObject:
        """What a manifest names, wherever it lies."""
        return InputObject("", file.uri, file.etag, file.bytes, file.sha256)


class Shard(msgspec.Struct, frozen=True, rename="camel"):
    """Consecutive lines of one input object: the lines whose first byte is in [start, end)."""

    object: int  # index in Plan.inputs
    start: int
    end: int
    number: int  # 1-based number of the first line in its object, blank lines counted
    first: int  # ordinal of the first line in the whole run, blank lines not counted
    lines: int
    last: int  # number of the last line in its object
    duplicates: str = ""  # ordinals within the shard whose custom_id an earlier line has
    kept: str = ""  # ordinals within the shard that succeeded in the run that this one completes

    def number_of(self, ordinal: int) -> int | None:
        """The number in its object of a line of the shard that cannot be read. None: blank lines stand between, nobody knows where."""
        return self.number + ordinal if self.last - self.number + 1 == self.lines else None


class Completes(msgspec.Struct, frozen=True, rename="camel"):
    """The finished run whose failed lines this one runs again."""

    run: str
    output: InputObject  # its output.jsonl
    lines: int
    usage: Usage


@known
class Plan(msgspec.Struct, frozen=True, rename="camel"):
    """plan.json: what there is to do. Written once."""

    run: str
    nonce: str
    digest: str
    endpoint: str
    inputs: list[InputObject]
    shards: list[Shard]
    models: list[str] | None = None  # that lines name, where they are few
    all_ids_checked: bool = True
    completes: Completes | None = None
    max_error_percent: int = 100  # of all lines; 100: any number may fail
    version: int = 1

    @property
    def total(self) -> int:
        return sum(shard.lines for shard in self.shards)

    def too_many(self, failed: int) -> bool:
        """Whether more lines failed than may."""
        return self.max_error_percent < 100 and failed * 100 > self.max_error_percent * self.total

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes, run: str | None = None) -> Plan:
        """The plan of `run`, if that is known. Raises Damaged, also if it is another run's."""
        name = Keys(run).plan if run is not None else "plan.json"
        plan = decoded(data, Plan, name, _ANEW)
        if run is not None and plan.run != run:
            raise Damaged(name, f"this is the plan of run {plan.run}, not of run {run}; {_ANEW}")
        return plan


class Part(msgspec.Struct, frozen=True, rename="camel"):
    """Finished lines in one object. Of an open one, a journal that grows, counts are what they were, and `bytes` is 0."""

    key: str
    bytes: int = 0
    lines: str = ""  # ordinals within the shard
    completed: int = 0
    failed: int = 0
    usage: Usage = msgspec.field(default_factory=Usage)
    ordered: bool = True  # records ascend by ordinal


@known
class State(msgspec.Struct, frozen=True, rename="camel"):
    """The state of a shard: who works on it and what is finished. A shard without one has not been begun."""

    epoch: int = 0  # grows with every change of owner
    owner: str | None = None
    index: int | None = None  # the owner's place in its Job
    nonce: str = ""
    seq: int = 0  # grows with every write
    parts: list[Part] = []
    open: Part | None = None  # the owner's journal
    term: Literal["done", "frozen"] | None = None

    @property
    def completed(self) -> int:
        return sum(part.completed for part in self.all_parts)

    @property
    def failed(self) -> int:
        return sum(part.failed for part in self.all_parts)

    @property
    def usage(self) -> Usage:
        usage = Usage()
        for part in self.all_parts:
            usage.add(part.usage)
        return usage

    @property
    def all_parts(self) -> list[Part]:
        return self.parts if self.open is None else [*self.parts, self.open]

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes, name: str = "the state of a shard") -> State:
        return decoded(data, State, name, "remove it, and the shard's lines run again")


@known
class Stop(msgspec.Struct, frozen=True, rename="camel"):
    """stop.json: the run ends early, and why. The first that is written counts."""

    reason: Reason
    nonce: str

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes) -> Stop:
        return decoded(data, Stop, "stop.json", "remove it, and the run goes on")
