"""Block diffusion on a rank: algorithms that decide positions, running blocks, and rounds."""
