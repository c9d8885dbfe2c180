"""HTTP APIs of a gateway: OpenAI's and Anthropic's, monitoring and administration."""
