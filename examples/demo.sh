#!/usr/bin/env bash
# `make demo`: install, then examples/demo.py shows the rest.
set -euo pipefail
trap 'exit 130' INT
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
.ci/install
exec "$VENV/bin/python" examples/demo.py
