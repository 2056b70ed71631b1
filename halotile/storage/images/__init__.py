"""PNG and TIFF export, and TIFF checks."""
