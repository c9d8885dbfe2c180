"""Grammar compilation, in processes with bounded memory and time."""
