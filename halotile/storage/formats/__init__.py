"""Readers of file formats, one module each; packages add more by entry points."""
