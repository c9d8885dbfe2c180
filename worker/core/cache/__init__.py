"""The KV cache's bookkeeping: pools of pages and slots, the prefix cache, leases on both."""
