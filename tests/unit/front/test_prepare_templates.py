"""A chat template, or variables for one, that a request brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from banyan_runtime import wire
from banyan_runtime.front.plan import Endpoint
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.planning import USER, chat, planner_of, refused


def test_a_request_brings_its_own_template_where_the_server_lets_it(planner: Planner, tiny_chat: Path) -> None:
    own = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ tone }}{% endfor %}"
    error = refused(planner, "chat", chat_template=own)
    assert (error.code, error.param) == ("unsupported", "chat_template")
    assert "--trust-request-chat-template" in error.message
    trusting = planner_of(tiny_chat, trust_request_chat_template=True)
    assert chat(trusting) == chat(planner)
    tokenizer = Tokenizer.load(tiny_chat)
    text = f"{tokenizer.named.get('bos_token', '')}<user>{USER[0]['content']}!"
    ids = wire.pack_ids(tokenizer.encode(text, add_special_tokens=False))
    for body in (
        {"chat_template": own, "chat_template_kwargs": {"tone": "!"}},
        {"chat_template_kwargs": {"tone": "!", "chat_template": own}},
    ):
        assert chat(trusting, **body).requests[0].token_ids == ids
    for body, param in (
        ({"chat_template": "{% for"}, "chat_template"),
        ({"chat_template": "(" * 5000 + "{{ " + "(" * 5000}, "chat_template"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "chat_template"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{% for"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"chat_template": [own]}}, "chat_template_kwargs.chat_template"),
        ({"chat_template": own, "chat_template_kwargs": {"chat_template": own}}, "chat_template_kwargs.chat_template"),
        ({"chat_template": own, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ):
        assert refused(trusting, "chat", **body).param == param, body


@pytest.mark.parametrize("name", ["tools", "documents", "messages", "add_generation_prompt", "chat_template", "eos_token"])
def test_template_variables_do_not_go_round_what_other_fields_refuse(planner: Planner, name: str) -> None:
    endpoints: tuple[Endpoint, ...] = ("chat", "tokenize")
    for endpoint in endpoints:
        error = refused(planner, endpoint, messages=USER, chat_template_kwargs={name: []})
        assert (error.code, error.param) == ("unsupported", f"chat_template_kwargs.{name}")
