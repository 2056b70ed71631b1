"""What happens to one block on one worker. The only room that knows torch; it does not know Dask."""
