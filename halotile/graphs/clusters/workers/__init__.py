"""The processes of workers, on this machine or on another: their environment, their start, and Dask's settings."""
