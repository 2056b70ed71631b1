"""Runs as batch jobs: one Slurm job holds driver, scheduler and workers, and goes on in another one when its time is up."""
