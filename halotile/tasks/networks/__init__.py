"""Networks that jobs can train, one file each, found by their names."""
