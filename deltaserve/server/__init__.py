"""The HTTP edge: OpenAI's endpoints over an engine client. No torch."""
