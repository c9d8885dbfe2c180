"""Plans and their results, and the channel between the coordinator and its ranks."""
