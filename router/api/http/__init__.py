"""HTTP below all APIs: bodies, keys, accounts, audit log, what reaches a client."""
