"""Engine core: step loop, scheduler, cache, grammars and executors. Only LocalExecutor uses
torch."""
