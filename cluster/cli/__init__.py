"""The `rayfleet` command."""
