"""Writes the table of families in docs/models.md: `python docs/models.py`; with `--check` it only tells if the table is out of date or
names a family that no test compares.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any, Final

from banyan_runtime.model.attention import triton_paged
from banyan_runtime.model.runners import RUNNERS
from banyan_runtime.models import registry

PAGE: Final = Path("docs/models.md")
TESTED: Final = Path("tests/support/models/tiny.py")
BEGIN: Final = "<!-- families: docs/models.py -->"
END: Final = "<!-- end of families -->"
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "shared_intermediate_size": 128, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 4096, "layers_block_type": ["attention"],
}  # fmt: skip
"""Of a config.json that leaves all else to its family."""


def table() -> str:
    rows = ["| family | architecture | CPU: C++ | CUDA: Triton attention | PyTorch |", "|---|---|---|---|---|"]
    for architecture, family in registry.FAMILIES.items():
        features = registry.parse(SIZES | {"architectures": [architecture]}).features
        native = not features - RUNNERS["native"].implements
        triton = not features & triton_paged.UNKNOWN
        rows.append(f"| {family.title} | `{architecture}` | {_word(native)} | {_word(triton)} | yes |")
    return "\n".join(rows)


def _word(implemented: bool) -> str:
    return "yes" if implemented else "by PyTorch"


def untested() -> list[str]:
    """Architectures that no small model of the tests has."""
    named = {node.value for node in ast.walk(ast.parse(TESTED.read_text())) if isinstance(node, ast.Constant)}
    return [each for each in registry.FAMILIES if not {each, each.removesuffix("ForCausalLM")} & named]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if missing := untested():
        sys.exit(f"{TESTED}: no model of {', '.join(missing)}; a family is listed when a test compares it")
    if not check:
        PAGE.write_text(made, encoding="utf-8")
    elif made != page:
        sys.exit(f"{PAGE}: the table of families is out of date: python docs/models.py")


if __name__ == "__main__":
    main()
