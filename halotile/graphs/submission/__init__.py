"""Runs as batch jobs: a batch job holds the driver, and goes on in another one when its time is up."""
