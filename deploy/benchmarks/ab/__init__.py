"""Comparisons of engine variants, measured in turn in this process without HTTP."""
