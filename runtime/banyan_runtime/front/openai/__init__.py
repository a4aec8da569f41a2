"""OpenAI's API: models, chat completions, completions."""
