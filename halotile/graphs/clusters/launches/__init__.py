"""Launches of workers elsewhere: batch jobs and job steps, and the thread that replaces lost ones."""
