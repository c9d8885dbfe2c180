"""Architectures, their configuration, the loader. Importing the package needs no torch."""
