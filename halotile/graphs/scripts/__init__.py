"""Commands around a user's script: what a run would find here, and a script beside a cluster."""
