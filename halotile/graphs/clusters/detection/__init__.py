"""Detection of what the environment offers: the kind of cluster, copies of a command, cores and GPUs. Nothing is started here."""
