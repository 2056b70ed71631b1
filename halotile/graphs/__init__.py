"""When and where things happen: plans, streams of tasks, clusters. The only room that knows Dask."""
