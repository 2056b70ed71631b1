"""Sharded Zarr arrays: metadata, codecs, reading regions, writing whole shards."""
