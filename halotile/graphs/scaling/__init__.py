"""The scaling report: a job run for a few blocks or steps with several numbers of workers."""
