"""Models that the transformers library computes, over our KV pool: its modules call `attention.py` in each layer instead of its own.

`library.py` finds the class of a model folder, `probe.py` makes a `DecoderSpec` of it, `weights.py` loads it, `decoder.py` runs steps,
`kind.py` is the runner's kind.
"""
