"""Connections between driver, scheduler and workers: addresses, certificates, the wait for a first worker."""
