"""Processes that take connections beside the first one of the front."""
