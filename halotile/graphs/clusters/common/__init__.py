"""What all kinds of clusters share: the choice of a kind, the cores and GPUs of this machine, secure connections, and answers in time."""
