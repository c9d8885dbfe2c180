"""KV cache management: page and slot pools, the prefix cache, and leases of pages and slots."""
