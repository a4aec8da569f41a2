"""How much fits into the context, and in which words it is said that it does not."""

from __future__ import annotations

import re

import pytest

from banyan_runtime import wire
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.prepare.prompts import check_ids, fit
from tests.unit.front.support import engine_info

INFO = engine_info(vocab_size=100, context_len=64, max_model_len=64, max_req_input_len=58)


def fitted(length: int, asked: int | None, default: int | None = None, info: wire.EngineInfo = INFO) -> int:
    return fit(length, asked, default, info, "messages")


def test_without_a_limit_the_rest_of_the_context_is_there() -> None:
    assert fitted(10, None) == 54
    assert fitted(10, None, default=16) == 16
    assert fitted(57, None, default=16) == 7
    assert fitted(10, 54) == 54


@pytest.mark.parametrize(
    ("length", "asked", "numbers"), [(10, 55, ["64", "65", "10", "55"]), (70, None, ["64", "70"]), (60, 1, ["58", "60"])]
)
def test_what_does_not_fit_is_refused_with_the_numbers(length: int, asked: int | None, numbers: list[str]) -> None:
    with pytest.raises(ApiError) as raised:
        fitted(length, asked)
    error = raised.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert re.findall(r"\d+", error.message) == numbers


def test_what_the_memory_holds_is_promised_and_not_the_models_context() -> None:
    small = engine_info(vocab_size=100, context_len=64, max_model_len=20, max_req_input_len=15)
    assert fitted(10, None, info=small) == 10
    with pytest.raises(ApiError, match="20 ") as raised:
        fitted(10, 11, info=small)
    assert raised.value.code == "context_length_exceeded"


def test_a_prompt_as_long_as_the_context_may_be_scored_and_leaves_no_room_for_output() -> None:
    whole = engine_info(vocab_size=100, context_len=64, max_model_len=64, max_req_input_len=64)
    assert fitted(64, 0, info=whole) == 0
    assert fitted(63, 1, info=whole) == 1
    for length, asked in ((65, 0), (64, 1), (64, None)):
        with pytest.raises(ApiError, match="64 ") as raised:
            fitted(length, asked, info=whole)
        assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize("token_id", [-1, 100, 2**70])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(ApiError) as raised:
        check_ids([1, token_id], INFO, "prompt")
    assert raised.value.param == "prompt"
