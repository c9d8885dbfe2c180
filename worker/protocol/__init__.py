"""Code that gateways and workers share: messages, parameters, block hashes, text. Does not import
torch."""
