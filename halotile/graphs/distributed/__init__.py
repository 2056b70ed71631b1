"""Objects of deepinv and networks, computed by Dask workers."""
