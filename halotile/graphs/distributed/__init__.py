"""Objects of other packages, computed by workers."""
