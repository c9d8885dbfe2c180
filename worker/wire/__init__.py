"""What gateways and workers share: messages, sampling parameters, block hashes, text. No torch."""
