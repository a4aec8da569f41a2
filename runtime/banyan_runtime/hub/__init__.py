"""Models on disk: where a `--model-path` leads, what lies in a model folder, and the few models that can be fetched by name."""

from banyan_runtime.hub.resolve import check, resolve

__all__ = ["check", "resolve"]
