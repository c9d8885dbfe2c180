"""Block diffusion on a rank: running blocks, and algorithms that decide their tokens in rounds."""
