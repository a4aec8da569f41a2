"""Anthropic's Messages API over the same chat completions."""
