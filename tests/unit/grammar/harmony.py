"""A model whose tokenizer and template are those of gpt-oss in small: messages in channels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from banyan_runtime.front.chat.reasoning.harmony import CALL, MARKERS, RETURN

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role != 'assistant' %}<|message|>{% endif %}{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> <|constrain|> #}"
)


def speaking_harmony(model: Path, folder: Path) -> Path:
    """A copy of `model` in `folder`, whose rows beyond its tokens are the markers of gpt-oss."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    first = 1 + max(entry["id"] for entry in added)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added += [{"id": first + number, "content": marker, **flags} for number, marker in enumerate(MARKERS)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    ends = [2, first + MARKERS.index(RETURN), first + MARKERS.index(CALL)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
