"""`python -m banyan_operator` is the command `banyan-operator`."""

import sys

from banyan_operator.cli import main

sys.exit(main())
