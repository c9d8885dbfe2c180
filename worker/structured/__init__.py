"""Constrained decoding: compiles grammars in bounded processes, follows them token by token."""
