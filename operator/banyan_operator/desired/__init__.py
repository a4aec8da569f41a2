"""What should exist for a resource: spec in, child objects out.

Pure: nothing is read, nothing is sent, equal input gives byte-equal output. `drift` says whether what exists is already so.
"""

from __future__ import annotations
