"""What decides: engine loop, scheduler, cache, grammars, executors. No torch."""
