"""One channel per worker: an attach stream coming in, coalesced submits going out."""
