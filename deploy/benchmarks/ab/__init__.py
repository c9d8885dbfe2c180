"""Comparisons of engine variants, which take turns in this process, without HTTP."""
