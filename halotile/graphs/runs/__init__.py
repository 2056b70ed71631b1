"""A run from claim to outcome, the same for every kind of job."""
