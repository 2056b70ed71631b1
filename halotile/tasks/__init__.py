"""Processing of one block on one worker. Of all folders only this one uses torch; it does not use Dask."""
