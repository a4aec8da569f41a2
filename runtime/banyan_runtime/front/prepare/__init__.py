"""From the bytes of a request to its plan, beside the event loop: pure planning, and the processes that do it."""
