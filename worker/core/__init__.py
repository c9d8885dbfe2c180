"""Engine core: step loop, scheduler, cache, grammars, executors. Only LocalExecutor uses torch."""
