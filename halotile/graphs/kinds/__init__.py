"""The contract of kinds of jobs, and the sections that they share. The kinds themselves are in ``graphs/jobs``."""
