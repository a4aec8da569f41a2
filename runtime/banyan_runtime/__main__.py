"""`python -m banyan_runtime` is `banyan-runtime`."""

import sys

from banyan_runtime.cli import main

sys.exit(main())
