"""The gateway: HTTP API, tokens, prefix index, choice of worker, the channel to each worker."""
