"""What the operating system does for a process of ours, for the parts of the server."""

from banyan_runtime.host import die_with_parent, resident_bytes

__all__ = ["die_with_parent", "resident_bytes"]
