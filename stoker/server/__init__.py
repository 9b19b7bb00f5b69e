"""The HTTP server: OpenAI and Anthropic APIs over loaded models."""
