"""Job files: read, checked key by key, and turned into a job. Nothing here prints."""
