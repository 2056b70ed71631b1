"""One file for each kind of cluster."""
