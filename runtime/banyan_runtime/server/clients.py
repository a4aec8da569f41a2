"""Whom an engine serves: the front's first process and other API processes, each over a link of its own.

An id tells whose a request is (`wire.client_of`), and each hears of its own alone. The first one's link is there for as long as the
engine is; the others come and go, and what one of them asked for ends with it. Only the first can make the engine wait: another that does
not read is cut off.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from banyan_runtime import wire
from banyan_runtime.link import Link

FRONT: Final = 0
UNSENT_MESSAGES: Final = 10_000  # one a step: a front that stalls for a minute does not stop the engine


class Clients:
    """The links, by the numbers of their clients."""

    def __init__(self, front: Link) -> None:
        self._links = {FRONT: front}

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())

    def send(self, message: wire.EngineMessage) -> None:
        """To whom it is for. Waits where the front takes nothing for long; what nobody hears any more is dropped."""
        if len(self._links) == 1:
            self._to(FRONT, message)
        elif isinstance(message, wire.StepOutput):
            for client, part in parted(message):
                self._to(client, part)
        else:
            self._to(recipient(message), message)

    def receive(self) -> Iterator[wire.FrontMessage]:
        """What has come from any of them. Joining is done here, and told to nobody."""
        for client, link in list(self._links.items()):
            if link.unsent:
                link.flush()
            for raw in link.received():
                message = wire.decode_front(raw)
                if isinstance(message, wire.Join):
                    if (descriptor := link.descriptor()) is not None:  # else it sees its other end closed
                        self._links[message.client] = Link(socket.socket(fileno=descriptor))
                else:
                    yield message
            if link.ended and client != FRONT:
                self._drop(client)
                yield wire.Left(client)

    def close(self, linger_s: float) -> None:
        """End all; what is unsent to the front may take so long to leave."""
        for link in self._links.values():
            link.close(linger_s if link is self._links[FRONT] else 0.0)

    def _to(self, client: int, message: wire.EngineMessage) -> None:
        if (link := self._links.get(client)) is None:
            return
        link.send(wire.encode(message))
        if client == FRONT:
            while link.unsent > UNSENT_MESSAGES:
                link.wait_for_room()
        elif link.unsent > UNSENT_MESSAGES:
            link.end()  # `receive` sees to the rest

    def _drop(self, client: int) -> None:
        self._links.pop(client).close()


class Wake:
    """What a loop without work waits for: a message on one of its links, room for one that is unsent, or a call of `wake` from any
    thread."""

    def __init__(self, links: Callable[[], list[Link]]) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._links = links

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def wait(self) -> None:
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        for link in self._links():
            if not link.ended:  # it could be read for ever
                poll.register(link, select.POLLIN | (select.POLLOUT if link.unsent else 0))
        poll.poll()
        with contextlib.suppress(BlockingIOError):  # it was a link
            os.eventfd_read(self._event)


def recipient(message: wire.EngineMessage) -> int:
    """Which client it is for, where it is for one."""
    match message:
        case wire.Failed(id=number) | wire.Flushed(seq=number) | wire.Pong(seq=number):
            return wire.client_of(number)
        case _:
            return FRONT


def parted(output: wire.StepOutput) -> list[tuple[int, wire.StepOutput]]:
    """What each client is to hear of a step, in the form of a step that had its requests alone."""
    owners = np.array(output.ids, np.int64) >> wire.CLIENT_BITS
    rows = {int(client): np.flatnonzero(owners == client) for client in np.unique(owners)}
    told: dict[int, _Told] = {client: _Told() for client in rows}
    for finish in output.finished:
        told.setdefault(wire.client_of(finish.id), _Told()).finished.append(finish)
    for part in output.prompt_logprobs:
        told.setdefault(wire.client_of(part.id), _Told()).prompt_logprobs.append(part)
    for vector in output.vectors:
        told.setdefault(wire.client_of(vector.id), _Told()).vectors.append(vector)
    if len(told) == 1:
        return [(next(iter(told)), output)]
    tokens = wire.unpack_ids(output.token_ids)
    none = np.zeros(0, np.intp)
    return [(client, _part(output, tokens, rows.get(client, none), more)) for client, more in told.items()]


@dataclass(slots=True)
class _Told:
    """What a step says of one client's requests, beside their tokens."""

    finished: list[wire.Finish] = field(default_factory=list)
    prompt_logprobs: list[wire.PromptLogprobs] = field(default_factory=list)
    vectors: list[wire.Vector] = field(default_factory=list)


def _part(output: wire.StepOutput, tokens: wire.TokenIds, rows: npt.NDArray[np.intp], told: _Told) -> wire.StepOutput:
    """`rows`: this client's requests, indices in `ids`, ascending."""
    ids, listed = output.ids, rows.tolist()
    counts = [output.counts[row] for row in listed] if output.counts else []
    ours = rows if not output.counts else np.flatnonzero(np.isin(np.repeat(np.arange(len(ids)), output.counts), rows))
    scored, logprobs = b"", None
    if output.logprobs is not None:
        all_scored = wire.unpack_ids(output.scored)
        kept = np.isin(all_scored, ours)
        if kept.any():
            scored, logprobs = wire.pack_ids(np.searchsorted(ours, all_scored[kept]).astype(np.int32)), _columns(output.logprobs, kept)
    return wire.StepOutput(
        ids=[ids[row] for row in listed],
        token_ids=wire.pack_ids(tokens[ours]),
        finished=told.finished,
        counts=counts,
        scored=scored,
        logprobs=logprobs,
        prompt_logprobs=told.prompt_logprobs,
        vectors=told.vectors,
    )


def _columns(columns: wire.LogprobColumns, kept: npt.NDArray[np.bool_]) -> wire.LogprobColumns:
    """`kept`: bool [N]."""
    width = columns.width
    values = np.frombuffer(columns.values, "<f4")[kept]
    ids = wire.unpack_ids(columns.top_ids).reshape(len(kept), width)[kept]
    top = np.frombuffer(columns.top_values, "<f4").reshape(len(kept), width)[kept]
    return wire.LogprobColumns(values.tobytes(), width, ids.tobytes(), top.tobytes())
