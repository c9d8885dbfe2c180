"""Model classes, one file per vendor."""
