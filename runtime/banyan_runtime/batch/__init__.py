"""OpenAI batch files: each input line ends in exactly one of output and errors, and results appear only when all are there."""
