"""Frontend of a worker: an asyncio process between gateways and the engine. Imports no torch."""
