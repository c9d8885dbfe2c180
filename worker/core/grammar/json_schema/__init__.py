"""JSON schemas: rewritten so that grammars enforce them exactly, or rejected."""
