"""The kinds of jobs, a folder for each, found by name; plug-ins add more by entry point ``halotile.jobs``."""
