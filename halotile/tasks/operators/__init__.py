"""One file for each imaging operator."""
