"""Model configuration: a checkpoint's config.json as a ModelConfig. Imports no torch."""
