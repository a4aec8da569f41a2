"""Chat messages to prompts, and generated text to reasoning and content."""
