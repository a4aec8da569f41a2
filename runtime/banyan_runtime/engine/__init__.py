"""The engine decides what runs next: queue, admission, KV memory, retraction, reports.

numpy at most. No torch, no HTTP, no sockets, no clock and no randomness of its own: `loop.Engine` is driven by its owner
with messages and turns, so the same code runs under a model in production and under a simulation in the tests.
"""
