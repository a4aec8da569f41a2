"""Whether calls of tools are fit to be run."""

from __future__ import annotations

import pytest

from banyan_runtime.front.chat.events import ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.openai.calls import Calls


@pytest.mark.parametrize(
    ("arguments", "fit"),
    [("{}", True), ('{"a": 1}', True), ("[]", False), ("12", False), ('"{}"', False), ("null", False), ('{"a":', False)],
)
def test_arguments_are_an_object(arguments: str, fit: bool) -> None:
    """Agents call a function with their members."""
    calls = Calls(lambda start: "call_1")
    calls.add([ToolStart(0, "f"), ToolArgs(0, arguments)])
    assert not calls.fit
    calls.add([ToolEnd(0)])
    assert calls.fit == fit
