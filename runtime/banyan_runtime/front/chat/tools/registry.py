"""All formats of tool calls, under the names that SGLang and vLLM know them by."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.tools.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.glm45 import GLM45
from banyan_runtime.front.chat.tools.harmony import HARMONY
from banyan_runtime.front.chat.tools.hermes import HERMES
from banyan_runtime.front.chat.tools.kimi_k2 import KIMI_K2
from banyan_runtime.front.chat.tools.llama3 import LLAMA3
from banyan_runtime.front.chat.tools.mistral import MISTRAL
from banyan_runtime.front.chat.tools.pythonic import PYTHONIC
from banyan_runtime.front.chat.tools.qwen3_coder import QWEN3_CODER

FORMATS: Final[tuple[ToolFormat, ...]] = (
    HERMES,
    LLAMA3,
    PYTHONIC,
    QWEN3_CODER,
    MISTRAL,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    KIMI_K2,
    HARMONY,
)
_BY_NAME: Final = {name: form for form in FORMATS for name in form.names}
NAMES: Final[tuple[str, ...]] = tuple(_BY_NAME)
"""Every name that `find` knows, spelt with `_`."""


def find(name: str) -> ToolFormat | None:
    """The format of this name, `-` and `_` being the same; None if there is none."""
    return _BY_NAME.get(name.replace("-", "_"))


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
    """The name of the format of calls that a chat template shows; None: none that is known."""
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return name
    return None
