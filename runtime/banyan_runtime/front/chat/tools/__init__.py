"""Tool calls in generated text.

`registry.py` names the formats. A format is a `ToolFormat` and a grammar that reads it, one file each; `json_calls.py`,
`json_scan.py` and `typed.py` are what several of them are made of.
"""
