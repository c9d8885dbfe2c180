"""Model classes, one file per family or group of similar families."""
