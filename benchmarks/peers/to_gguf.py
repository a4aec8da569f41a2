"""llama.cpp's own conversion, for tokenizers that it does not know too: `to_gguf LLAMA_CPP PACKAGES MODEL --outtype T --outfile F`."""

from __future__ import annotations

import runpy
import sys
from typing import Any


def main() -> None:
    vendor, packages = sys.argv.pop(1), sys.argv.pop(1)
    sys.path[:0] = [vendor, f"{vendor}/gguf-py"]
    sys.path.append(packages)
    from conversion.base import TextModel  # type: ignore[import-not-found]

    known = TextModel.get_vocab_base_pre

    def base_pre(self: Any, tokenizer: Any) -> str:
        """How text is cut before BPE is recognised by a hash; of a tokenizer that was made up it does not matter."""
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "qwen2"

    TextModel.get_vocab_base_pre = base_pre
    sys.argv[0] = f"{vendor}/convert_hf_to_gguf.py"
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
