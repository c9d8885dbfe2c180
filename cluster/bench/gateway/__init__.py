"""`bench gateway`: what a token costs before the engine, with an engine that computes nothing."""
