"""How models are refused."""

from __future__ import annotations

from typing import Final

import transformers

from banyan_runtime.errors import ModelError

LIBRARY: Final = f"transformers {transformers.__version__}"
_SHOWN: Final = 300  # characters of the library's words


def refusal(where: str, reason: str) -> ModelError:
    """The error of a model that the library computes and that cannot be served; `where` names its config.json."""
    return ModelError(f"{where}: {LIBRARY}'s form of this model cannot be served: {reason}; serve a model of docs/models.md")


def line(error: BaseException) -> str:
    """What an error of the library says, on one line."""
    return " ".join(str(error).split())[:_SHOWN] or type(error).__name__
