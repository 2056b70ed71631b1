"""Denoisers, one file each; other packages add more by the entry point ``halotile.denoisers``."""
