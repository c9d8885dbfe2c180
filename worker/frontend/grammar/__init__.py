"""Grammar compilation in processes with limited memory and time."""
