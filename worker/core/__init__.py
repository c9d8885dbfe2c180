"""Engine core: step loop, scheduler, cache, grammars and executors. No torch but in
LocalExecutor."""
