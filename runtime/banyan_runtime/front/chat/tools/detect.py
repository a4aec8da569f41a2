"""Which format of tool calls a chat template speaks: it shows the model how calls are written."""

from __future__ import annotations

from typing import Final

_SIGNS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("gpt_oss", ("<|channel|>", "<|constrain|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("llama4", ("<|python_start|>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("ipython", '"parameters": ')),
)
"""What a template holds that writes calls in a format; all of a row. The first row that fits decides."""


def detect(template: str) -> str | None:
    """The name of the format; None: the template shows none that is known."""
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return name
    return None
