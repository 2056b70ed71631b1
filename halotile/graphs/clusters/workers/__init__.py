"""The processes of workers, on this machine or on another: their environment, how they start, and what Dask is told."""
