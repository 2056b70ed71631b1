"""Where the numbers lie: grids of blocks, arrays, shards, journals. Knows neither Dask nor torch."""
