"""Arrays on disk: grids of blocks, file formats, shards and journals, without Dask or torch."""
