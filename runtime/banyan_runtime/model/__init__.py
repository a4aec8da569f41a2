"""Tokens in, sampled tokens out: the only place with torch. Knows `step` and `config`, neither front nor engine."""

import os

# libgomp reads this once, when torch loads it. By default its threads spin for milliseconds at the end of every parallel
# region; with another busy process on the same cores (the front, a batch worker) each region then waits for a preempted
# thread: measured 8 ms instead of 0.05 ms per linear layer. A short spin keeps the quiet machine fast all the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
