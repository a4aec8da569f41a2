"""The attention function that is registered with transformers. What computes arrives as an argument of each call, so there is no state."""

from __future__ import annotations

from typing import Any, Final, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME: Final = "banyan"
"""Of the implementation. transformers makes no masks for it, so positions of a step need not be in one order."""
MASKED: Final = "banyan_masked"
"""The same for a model that is probed: `probe.py` registers what reads its masks."""
ARGUMENT: Final = "banyan_attention"
"""Name under which an `Attend` is given to a model, which passes it on."""


class Attend(Protocol):
    """Computes the attention of one layer."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: dict[str, Any]
    ) -> Tensor:
        """query [1, heads, T, head_dim], key and value [1, kv_heads, T, …], rotated → [1, T, heads, value_dim]."""


class NotPassed(Exception):
    """Raised where a model does not pass its arguments on to attention."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    banyan_attention: Attend | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention interface."""
    if banyan_attention is None:
        raise NotPassed
    return banyan_attention(module, query, key, value, attention_mask, settings), None


for name in (NAME, MASKED):
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
