"""Runs as batch jobs: one job of Slurm's holds driver, scheduler and workers, and goes on in another one when its time is up."""
