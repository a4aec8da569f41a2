"""The Responses API: conversations in items, kept by the server if the client wants it."""
