"""The kinds of jobs, one folder each, found by name; plug-ins add more through the entry point ``halotile.jobs``."""
