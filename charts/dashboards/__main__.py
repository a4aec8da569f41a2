"""Writes the chart's Grafana dashboards: `python charts/dashboards` puts them into charts/banyan/dashboards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from batches import BATCHES
from operators import OPERATOR
from panels import Board, dashboard
from servers import RUNTIME

FOLDER: Final = Path(__file__).parent.parent / "banyan" / "dashboards"
BOARDS: Final = (RUNTIME, BATCHES, OPERATOR)


def text(board: Board) -> str:
    return json.dumps(dashboard(board), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(text(board))
    return 0


if __name__ == "__main__":
    sys.exit(main())
