"""Runs as batch jobs: a batch job runs the driver; when its time is up, another one continues it."""
