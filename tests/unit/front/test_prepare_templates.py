"""A chat template, or variables for one, that a request brings."""

from __future__ import annotations

import pytest

from banyan_runtime.front.plan import Endpoint
from banyan_runtime.front.prepare.planner import Planner
from tests.unit.front.planning import USER, refused


@pytest.mark.parametrize("name", ["tools", "documents", "messages", "add_generation_prompt", "chat_template", "eos_token"])
def test_template_variables_do_not_go_round_what_other_fields_refuse(planner: Planner, name: str) -> None:
    endpoints: tuple[Endpoint, ...] = ("chat", "tokenize")
    for endpoint in endpoints:
        error = refused(planner, endpoint, messages=USER, chat_template_kwargs={name: []})
        assert (error.code, error.param) == ("unsupported", f"chat_template_kwargs.{name}")
