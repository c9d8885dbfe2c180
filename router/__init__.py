"""The gateway: HTTP APIs, tokenization, prefix index, routing, and channels to workers."""
