"""Code that gateways and workers share: messages, parameters, block hashes, text. Imports no
torch."""
