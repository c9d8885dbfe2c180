"""Architectures, their configuration, and the loader. Importing the package does not import
torch."""
