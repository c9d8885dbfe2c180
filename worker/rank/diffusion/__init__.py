"""Block diffusion: algorithms that decide positions, and the two ways to run a batch of blocks."""
