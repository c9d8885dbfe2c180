"""Compiles grammars, in processes with bounded memory and time."""
