"""Model configuration: a checkpoint's config.json as a ModelConfig. Does not import torch."""
