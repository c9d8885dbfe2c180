"""Variants of an engine against each other, in turn on this machine, without HTTP."""
