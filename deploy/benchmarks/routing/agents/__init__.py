"""Closed loops of coding agents: sessions whose next request follows the end of the last one."""
