"""One file for each denoiser; a user's package adds more by entry point ``halotile.denoisers``."""
