"""JSON schemas: rewrites them to what grammars enforce exactly, or rejects them."""
