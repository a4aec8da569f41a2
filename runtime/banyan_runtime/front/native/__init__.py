"""SGLang's own API: /generate, server and model information, cache and abort control, tokenizing."""
