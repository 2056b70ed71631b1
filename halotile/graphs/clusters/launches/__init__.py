"""Launches, each of which brings a worker from elsewhere: batch jobs and job steps, and the thread that replaces lost ones."""
