"""What core and ranks share: Plans and their results, and the channel that carries them."""
