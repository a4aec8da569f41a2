"""A grammar that does not compile ends the process that tries it, behind an answer for its client."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.plan import RefusalPlan
from banyan_runtime.front.prepare import worker
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_client import (
    LENGTH,
    Hello,
    Message,
    Planned,
    Rendering,
    Request,
    Tokenizing,
    decode_message,
    framed,
)
from banyan_runtime.front.text.text import Text
from banyan_runtime.grammar.trial import Trial
from banyan_runtime.wire import Grammar
from tests.unit.front.support import engine_info


class Endless:
    """Computes in C, without Python's lock and until it is ended."""

    def compile(self, grammar: Grammar) -> NoReturn:
        while True:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000_000)


@pytest.fixture
def connection(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """To a worker whose grammar backend never comes to an end."""
    monkeypatch.setattr(worker, "TRIAL_CPU_S", 0.3)
    config = ServerConfig(model_path=str(tiny_chat))
    text = Text.load(config, tiny_chat)
    planner = Planner(config, text, engine_info(vocab_size=text.model_config["vocab_size"]), Constraints(Trial(Endless(), 1000)))
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        worker.serve(theirs, planner, text.template)
    theirs.close()
    with ours:
        ours.settimeout(60)
        yield ours
    assert os.waitpid(pid, 0)[1] == 0


def read(connection: socket.socket) -> Message:
    (size,) = LENGTH.unpack(connection.recv(LENGTH.size, socket.MSG_WAITALL))
    return decode_message.decode(connection.recv(size, socket.MSG_WAITALL))


def test_an_endless_grammar_is_an_error_of_its_own_request(connection: socket.socket) -> None:
    assert isinstance(read(connection), Hello)
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "regex": "a"}).encode()
    connection.sendall(framed(Request("chat", "one", len(body))) + body)
    messages = [read(connection)]
    while not isinstance(messages[-1], Planned):
        messages.append(read(connection))
    *before, planned = messages
    assert Rendering() not in before or before.index(Rendering()) < before.index(Tokenizing())  # else the chat template would be blamed
    assert isinstance(planned, Planned)
    assert isinstance(planned.plan, RefusalPlan)
    assert (planned.plan.status, planned.plan.code, planned.plan.param) == (400, "invalid_grammar", "regex")
    assert " 3 s" in planned.plan.message
    assert planned.last
    assert connection.recv(1) == b""
