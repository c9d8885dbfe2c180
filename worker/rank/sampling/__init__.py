"""From logits to tokens: edits, masks, draws and log-probabilities."""
