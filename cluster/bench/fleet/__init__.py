"""`bench fleet`: one gateway's routing code before ten thousand simulated workers."""
