"""One file for each file format that can be read; a user's package adds more by entry point."""
