"""The front process: HTTP and text. Never imports torch, the model or the engine."""
