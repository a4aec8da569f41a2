"""A load generator for servers of OpenAI's completions. `cases`: what is asked; `play`: asks it; `summary`: what came, in numbers."""
