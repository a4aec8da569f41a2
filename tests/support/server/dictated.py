"""A server whose model says what a test dictates: its engine draws no other token than the next one of that. All else is as ever."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from tests.support.server.process import ServerProcess

CONTEXT: Final = 131072  # tokens: agents bring long prompts, and this tokenizer has few words
TURN_END: Final = "<|im_end|>"
_PATCH: Final = """
    import os, sys
    if "banyan_runtime.server.engine_process" in sys.orig_argv:
        import json
        from dataclasses import replace
        from pathlib import Path
        import numpy as np
        from banyan_runtime.model.runner import ModelRunner
        from banyan_runtime.step import TokenMask
        script, launch, tokens = Path(os.environ["DICTATED"]), ModelRunner.launch, []
        def dictated(self, step, *, replay=True):
            if step.samples.any():
                if step.mode != "decode" and script.exists():
                    first, *others = json.loads(script.read_text()) or [[]]
                    tokens[:] = first
                    script.write_text(json.dumps(others))
                if tokens:
                    assert len(step.rows) == 1, "one answer at a time can be dictated"
                    token = tokens.pop(0)
                    words = np.zeros((1, (self.info.vocab_size + 31) // 32), np.uint32)
                    words[0, token // 32] = 1 << (token % 32)
                    step = replace(step, mask=TokenMask(words, np.zeros(1, np.int32)))
            return launch(self, step, replay=replay)
        ModelRunner.launch = dictated
"""


class DictatedServer:
    """Its model is the small one of the repository, with a longer context."""

    def __init__(self, tiny_chat: Path, folder: Path, *flags: str) -> None:
        """`folder` is the server's own."""
        model = shutil.copytree(tiny_chat, folder / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
        (folder / "sitecustomize.py").write_text(textwrap.dedent(_PATCH))
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
        self._script = folder / "script.json"
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.process = ServerProcess(model, folder / "server.log", *flags, environment={"PYTHONPATH": path, "DICTATED": str(self._script)})

    def dictate(self, answers: Sequence[str]) -> None:
        """What is said to the next requests, in their order."""
        tokens = [self._tokenizer.encode(text + TURN_END, add_special_tokens=False).ids for text in answers]
        self._script.write_text(json.dumps(tokens))

    @property
    def unsaid(self) -> int:
        """How many answers nobody has asked for yet."""
        return len(json.loads(self._script.read_text()))


def called(name: str, arguments: dict[str, Any]) -> str:
    """A call, as this model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
