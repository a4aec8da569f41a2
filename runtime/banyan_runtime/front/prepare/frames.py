"""What crosses between the front and the processes that plan, both ways of one stream socket.

To a worker: a head, the request's id, the body. From it: frames, of which the last of a request is its plan. A plan goes
without what its sequences have in common: each prompt's ids are sent once and raw, so that taking them in costs the event loop
next to nothing, however long they are and however many choices they have.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Literal, TypeVar, get_args

import msgspec

from banyan_runtime import wire
from banyan_runtime.front.plan import AnswerPlan, ChatPlan, CompletionPlan, Endpoint, GenerateRequest, NativePlan, Plan, PooledPlan

REQUEST_HEAD: Final = struct.Struct("<BHQ")  # endpoint, bytes of the request's id, bytes of the body
FRAME_HEAD: Final = struct.Struct("<cQ")  # kind, bytes of what follows
ENDPOINTS: Final[tuple[Endpoint, ...]] = get_args(Endpoint)
P = TypeVar("P", bound=msgspec.Struct)

Kind = Literal[b"h", b"r", b"t", b"p", b"e"]
HELLO: Final = b"h"  # a worker is there; its process id as msgpack
RENDERING: Final = b"r"  # the chat template begins: what happens from here on may be its fault
TOKENIZING: Final = b"t"  # it has ended; not told where what follows is too little to matter
PLAN: Final = b"p"  # a `Packed`, and behind it the raw parts
BROKEN: Final = b"e"  # a bug: the trace as msgpack, for the log


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A plan without its raw parts."""

    plan: Plan
    shapes: list[GenerateRequest] = []  # without ids and seed
    sequences: list[tuple[int, int, int]] = []  # shape, part that is the prompt, seed
    echoes: list[str] = []  # one for each prompt
    sizes: list[int] = []  # bytes of each raw part
    last: bool = False  # the worker ends: it has grown


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Packed)


def request_head(endpoint: Endpoint, request_id: bytes, body_bytes: int) -> bytes:
    return REQUEST_HEAD.pack(ENDPOINTS.index(endpoint), len(request_id), body_bytes) + request_id


def frame(kind: bytes, content: object) -> bytes:
    raw = _encode(content)
    return FRAME_HEAD.pack(kind, len(raw)) + raw


def pack(plan: Plan, *, last: bool = False) -> list[bytes]:
    """The plan as one frame and its raw parts, to be sent one after another."""
    match plan:
        case AnswerPlan():
            parts: list[bytes] = [plan.body]
            packed = Packed(msgspec.structs.replace(plan, body=b""), sizes=[len(plan.body)], last=last)
        case ChatPlan() | CompletionPlan() | NativePlan() | PooledPlan():
            shapes: dict[GenerateRequest, int] = {}
            prompts: dict[bytes, int] = {}
            sequences: list[tuple[int, int, int]] = []
            for request in plan.requests:
                shape = msgspec.structs.replace(request, token_ids=b"", sampling=msgspec.structs.replace(request.sampling, seed=0))
                numbers = (shapes.setdefault(shape, len(shapes)), prompts.setdefault(request.token_ids, len(prompts)))
                sequences.append((*numbers, request.sampling.seed))
            echoes = list(plan.echoes[:: plan.choices_per_prompt]) if isinstance(plan, CompletionPlan) else []
            parts = list(prompts)
            packed = Packed(_bare(plan), list(shapes), sequences, echoes, [len(part) for part in parts], last)
        case _:
            parts = []
            packed = Packed(plan, last=last)
    return [frame(PLAN, packed), *parts]


def _bare(plan: P) -> P:
    return msgspec.structs.replace(plan, requests=(), **({"echoes": ()} if isinstance(plan, CompletionPlan) else {}))


def unpack_head(raw: bytes | bytearray | memoryview) -> Packed:
    return _decoder.decode(raw)


def unpack(packed: Packed, parts: Sequence[bytes]) -> Plan:
    """The plan that was packed, with its raw parts put back."""
    plan = packed.plan
    match plan:
        case AnswerPlan():
            return msgspec.structs.replace(plan, body=parts[0])
        case ChatPlan() | NativePlan() | PooledPlan():
            return msgspec.structs.replace(plan, requests=_requests(packed, parts))
        case CompletionPlan():
            echoes = tuple(echo for echo in packed.echoes for _ in range(plan.choices_per_prompt))
            return msgspec.structs.replace(plan, requests=_requests(packed, parts), echoes=echoes)
        case _:
            return plan


def _requests(packed: Packed, parts: Sequence[bytes]) -> tuple[GenerateRequest, ...]:
    replace = msgspec.structs.replace
    requests: list[GenerateRequest] = []
    for shape_index, part, seed in packed.sequences:
        shape = packed.shapes[shape_index]
        sampling: wire.Sampling = replace(shape.sampling, seed=seed)
        requests.append(replace(shape, token_ids=parts[part], sampling=sampling))
    return tuple(requests)
