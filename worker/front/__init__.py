"""A worker's asyncio process: takes requests in and reports what became of them. No torch."""
