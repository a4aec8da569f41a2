"""Grammars: compilers, and the libraries behind them."""
