"""From the bytes of a request to its plan, on the small model of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import AnswerPlan, ChatPlan, CompletionPlan, Endpoint, NativePlan, Plan
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.text import Text
from tests.unit.front.support import engine_info

USER = [{"role": "user", "content": "What is the capital of France?"}]


def planner_of(folder: Path, constraints: Constraints | None = None, **flags: Any) -> Planner:
    config = ServerConfig(model_path=str(folder), served_model_name=("tiny", "other"), **flags)
    text = Text.load(config, folder)
    return Planner(config, text, engine_info(vocab_size=text.model_config["vocab_size"]), constraints)


def plan(planner: Planner, endpoint: Endpoint, body: dict[str, Any]) -> Plan:
    return planner.plan(endpoint, json.dumps(body).encode(), "request")


def chat(planner: Planner, **body: Any) -> ChatPlan:
    made = plan(planner, "chat", {"messages": USER, **body})
    assert isinstance(made, ChatPlan)
    return made


def completion(planner: Planner, **body: Any) -> CompletionPlan:
    made = plan(planner, "completions", {"prompt": "Hello there", **body})
    assert isinstance(made, CompletionPlan)
    return made


def native(planner: Planner, **body: Any) -> NativePlan:
    made = plan(planner, "generate", body)
    assert isinstance(made, NativePlan)
    return made


def refused(planner: Planner, endpoint: Endpoint, **body: Any) -> ApiError:
    basis: dict[str, dict[str, Any]] = {"chat": {"messages": USER}, "completions": {"prompt": "a"}}
    with pytest.raises(ApiError) as raised:
        plan(planner, endpoint, {**basis.get(endpoint, {}), **body})
    assert 400 <= raised.value.status < 500
    return raised.value


def answer(planner: Planner, endpoint: Endpoint, **body: Any) -> bytes:
    made = plan(planner, endpoint, body)
    assert isinstance(made, AnswerPlan)
    return made.body
