"""Log probabilities that a request asks for, in its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.openai.responses.references import Before
from banyan_runtime.front.plan import Endpoint
from banyan_runtime.front.prepare import sequences as prepared
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.text import Text
from tests.unit.front.planning import chat, completion, native, refused
from tests.unit.front.support import engine_info


def test_logprobs_of_a_chat(planner: Planner) -> None:
    assert chat(planner).top_logprobs == -1
    assert chat(planner).requests[0].logprobs is None
    assert chat(planner, logprobs=False).top_logprobs == -1
    made = chat(planner, logprobs=True, top_logprobs=3)
    assert (made.top_logprobs, made.requests[0].logprobs) == (3, wire.LogprobRequest(output_top=3))
    assert chat(planner, logprobs=True).requests[0].logprobs == wire.LogprobRequest(output_top=0)


def test_logprobs_of_an_echoed_prompt_start_behind_its_first_token(planner: Planner) -> None:
    made = completion(planner, prompt=[5, 6, 7], echo=True, logprobs=2, max_tokens=0)
    assert (made.echo_logprobs, made.top_logprobs) == (True, 2)
    assert made.requests[0].logprobs == wire.LogprobRequest(output_top=-1, prompt_from=1, prompt_top=2)
    assert made.requests[0].sampling.max_new_tokens == 0
    assert completion(planner, logprobs=1).requests[0].logprobs == wire.LogprobRequest(output_top=1)
    alone = completion(planner, prompt=[5], echo=True, logprobs=2, max_tokens=0)
    assert alone.requests[0].logprobs is None  # nothing comes before it: there is nothing to compute


def test_logprobs_of_generate_come_by_item(planner: Planner) -> None:
    made = native(
        planner,
        input_ids=[[5, 6, 7], [5, 6], [8]],
        return_logprob=[True, True, False],
        logprob_start_len=[0, -1, 0],
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    assert [request.logprobs for request in made.requests] == [wire.LogprobRequest(2, 1, 2), wire.LogprobRequest(2), None]
    assert (made.top_logprobs, made.logprobs_from, made.text_in_logprobs) == ((2, 2, -1), (0, -1, -1), True)
    named = native(planner, input_ids=[[5, 6], [7]], return_logprob=True, token_ids_logprob=[4, 9])
    assert (named.named, {request.logprobs for request in named.requests}) == (
        (2, 2),
        {wire.LogprobRequest(0, named=wire.pack_ids([4, 9]))},
    )
    each = native(planner, input_ids=[[5, 6], [7]], return_logprob=[True, False], token_ids_logprob=[[4], [9]])
    assert (each.named, each.requests[0].logprobs) == ((1, 0), wire.LogprobRequest(0, named=wire.pack_ids([4])))
    behind = native(planner, input_ids=[5, 6, 7], return_logprob=True, logprob_start_len=1)
    assert (behind.logprobs_from, behind.requests[0].logprobs) == ((1,), wire.LogprobRequest(0, 2, 0))
    assert refused(planner, "generate", text="a", return_logprob=True, logprob_start_len=50).param == "logprob_start_len"
    assert refused(planner, "generate", text="a", return_logprob=[True, False]).param == "return_logprob"
    assert refused(planner, "generate", text="a", return_logprob=True, top_logprobs_num=21).param == "top_logprobs_num"


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": 1}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"top_logprobs": 1}, "top_logprobs"),
        ("chat", {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("generate", {"text": "a", "token_ids_logprob": [99_999]}, "token_ids_logprob"),
        ("generate", {"text": "a", "token_ids_logprob": ["a"]}, "token_ids_logprob"),
        ("generate", {"text": "a", "token_ids_logprob": [1.5]}, "token_ids_logprob"),
        ("generate", {"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ("generate", {"text": "a", "token_ids_logprob": [1] * 129}, "token_ids_logprob"),
    ],
)
def test_logprobs_that_cannot_be_had_are_refused(planner: Planner, endpoint: Endpoint, body: dict[str, Any], param: str) -> None:
    error = refused(planner, endpoint, **body)
    assert (error.status, error.param) == (400, param)


def roomy(folder: Path, context: int) -> Planner:
    """For a server with this context, which takes as many choices as a request may ask for."""
    text = Text.load(ServerConfig(model_path=str(folder)), folder)
    lengths = {"context_len": context, "max_model_len": context, "max_req_input_len": context - 6}
    info = engine_info(vocab_size=text.model_config["vocab_size"], max_running_requests=256, **lengths)
    return Planner(ServerConfig(model_path=str(folder), served_model_name=("tiny",)), text, info)


def test_a_chat_without_a_limit_gets_as_many_tokens_as_an_answer_can_hold_the_logprobs_of(tiny_chat: Path) -> None:
    planner = roomy(tiny_chat, 8192)
    for n in (32, 128):  # no number of choices is refused
        made = chat(planner, n=n, logprobs=True, top_logprobs=20)
        (most,) = {request.sampling.max_new_tokens for request in made.requests}
        assert 1024 < most == 4_000_000 // (n * 21) < 8000
    whole = 8192 - made.requests[0].prompt_tokens
    for body in ({"n": 32}, {"n": 4, "logprobs": True, "top_logprobs": 20}):  # what fits is as it was
        assert {request.sampling.max_new_tokens for request in chat(planner, **body).requests} == {whole}


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({"max_tokens": 6000}, "max_tokens"),
        ({"max_completion_tokens": 6000}, "max_completion_tokens"),
        ({"min_tokens": 6000}, "max_tokens"),
    ],
)
def test_a_client_that_wants_more_logprobs_than_an_answer_holds_hears_how_many_tokens_fit(
    tiny_chat: Path, limits: dict[str, int], limit: str
) -> None:
    planner = roomy(tiny_chat, 8192)
    asked = {"n": 32, "logprobs": True, "top_logprobs": 20}
    error = refused(planner, "chat", **asked, **limits)
    assert (error.param, error.code) == ("top_logprobs", "integer_above_max_value")
    assert limit in error.message
    assert "5952" in error.message
    assert chat(planner, **asked, max_tokens=5952).requests[0].sampling.max_new_tokens == 5952


def test_a_limit_too_low_to_be_meant_is_put_on_nobody(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_LOGPROBS", 1024 * 21 * 4)
    planner = roomy(tiny_chat, 8192)
    assert chat(planner, n=4, logprobs=True, top_logprobs=20).requests[0].sampling.max_new_tokens == 1024
    error = refused(planner, "chat", n=5, logprobs=True, top_logprobs=20)
    assert "max_tokens" in error.message
    assert "819" in error.message


def test_a_response_is_told_of_its_own_field(tiny_chat: Path) -> None:
    body = {"input": "Hi", "max_output_tokens": 200_000, "top_logprobs": 20}
    given = msgspec.json.encode(Before(id="resp_1")) + b"\n" + msgspec.json.encode(body)
    with pytest.raises(ApiError, match=r"max_output_tokens.* 190476"):
        roomy(tiny_chat, 262_144).plan("responses", given, "r")
