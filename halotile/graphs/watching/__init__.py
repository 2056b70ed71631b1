"""Views of a run: a page beside Dask's own, its figures for Prometheus, a report at the end."""
