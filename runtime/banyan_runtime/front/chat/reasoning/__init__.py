"""Reasoning: text between two markers that the model thinks in before it answers.

`FORMATS` names the families of `--reasoning-parser`; the parser that reads all of them but gpt-oss is in `parser.py`.
"""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reasoning.format import ReasoningFormat, Start
from banyan_runtime.front.chat.reasoning.harmony import HarmonyFormat
from banyan_runtime.front.chat.reasoning.parser import ReasoningParser

_THINK: Final = ReasoningFormat("<think>", "</think>")
_FORCED: Final = ReasoningFormat("<think>", "</think>", unmarked=Start.REASONING)
_OFF: Final = ReasoningFormat("<think>", "</think>", unmarked=Start.CONTENT)

_HARMONY: Final = HarmonyFormat()

_NAMED: Final[dict[str, ReasoningFormat]] = {
    "qwen3": _THINK,
    "qwen3-thinking": _FORCED,
    "deepseek-r1": _FORCED,
    "deepseek-v3": _OFF,  # its template opens the block where thinking is asked for
    "glm45": _THINK,
    "glm47": _THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi-k2": _THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", older=_THINK),
    "gpt-oss": _HARMONY,
    "openai-gptoss": _HARMONY,
}
FORMATS: Final[dict[str, ReasoningFormat]] = {
    spelling: form for name, form in _NAMED.items() for spelling in (name, name.replace("-", "_"))
}
"""By the names of SGLang and vLLM, `-` and `_` being the same."""

__all__ = ["FORMATS", "HarmonyFormat", "ReasoningFormat", "ReasoningParser", "Start"]
