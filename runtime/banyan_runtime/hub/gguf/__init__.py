"""GGUF files: what their headers say, a model folder made of one, and the conversion to safetensors."""
