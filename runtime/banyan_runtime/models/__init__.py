"""Model families: config.json → `DecoderSpec` (a decoder as data), and checkpoint names → parameters. One file a family; no torch."""
