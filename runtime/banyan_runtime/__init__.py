"""Banyan's inference runtime: an OpenAI HTTP server over a continuous-batching engine, and a batch runner."""

__version__ = "0.1.0"
