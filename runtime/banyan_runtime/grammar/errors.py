"""What grammars raise."""

from __future__ import annotations


class GrammarError(Exception):
    """A grammar cannot be compiled, or admits nothing more. The message is for the client whose grammar it is."""


class GrammarBusy(GrammarError):
    """Nothing is known against the grammar: this server cannot compile it now. Later it may."""
