"""Job files: read, checked key by key, and turned into a job. This package prints nothing."""
