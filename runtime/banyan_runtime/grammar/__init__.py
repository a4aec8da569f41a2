"""Grammars: what an output must be, compiled into masks over the vocabulary. Knows neither HTTP nor the engine nor the model."""
