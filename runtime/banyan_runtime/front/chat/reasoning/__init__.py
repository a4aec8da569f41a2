"""Reasoning: text between two markers that the model thinks in before it answers.

`FORMATS` names the families of `--reasoning-parser`; the machine that reads all of them is in `parser.py`.
"""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reasoning.parser import ReasoningFormat, ReasoningParser, Start

FORMATS: Final[dict[str, ReasoningFormat]] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "qwen3-thinking": ReasoningFormat("<think>", "</think>", forced=True),
    "deepseek-r1": ReasoningFormat("<think>", "</think>", forced=True),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}

__all__ = ["FORMATS", "ReasoningFormat", "ReasoningParser", "Start"]
