"""instructor against a real server."""

from __future__ import annotations

import pytest

from tests.e2e.clients.conftest import Answers, Told

pytestmark = pytest.mark.timeout(1500)  # with the installation, once


@pytest.fixture(scope="module")
def answers(told: Told) -> Answers:
    return told("use_instructor", "frameworks")


@pytest.mark.parametrize("mode", ["tools", "json_schema"])
def test_an_answer_is_an_object_of_the_class(answers: Answers, mode: str) -> None:
    visit = answers(mode)
    assert visit["city"] == "Oslo"
    assert 1 <= visit["days"] <= 9


def test_json_mode_answers_with_an_object(answers: Answers) -> None:
    assert isinstance(answers("json"), dict)


@pytest.mark.parametrize("mode", ["partial_tools", "partial_json_schema"])
def test_an_object_grows_while_it_is_streamed(answers: Answers, mode: str) -> None:
    tries = answers(mode)
    assert any(part["days"] is None for part in tries[-1])
    for parts in tries:
        assert 1 <= parts[-1]["days"] <= 9
        for field in ("city", "days"):
            told = [part[field] for part in parts]
            since = next(index for index, value in enumerate(told) if value == told[-1])
            assert told[since:] == [told[-1]] * (len(told) - since), "what is told stays"
            assert all(str(told[-1]).startswith(value or "") for value in told[:since]), "and grows"
        assert parts[-1]["city"] == "Oslo"
