"""Functions mapped over overlapping blocks of stored arrays."""
