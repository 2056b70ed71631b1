"""Path checks, mounts and durable writes on the local file system."""
