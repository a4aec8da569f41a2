"""`banyan-runtime serve` whose /health_generate waits 3 s for a token, not 20 s."""

from __future__ import annotations

import sys

from banyan_runtime.cli import main
from banyan_runtime.front.ops import probe

probe.GENERATE_LIMIT_S = 3.0  # type: ignore[misc]

if __name__ == "__main__":
    sys.exit(main())
