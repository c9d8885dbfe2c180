"""HTTP layer shared by all APIs: bodies, API keys, accounts, audit log, sending responses."""
