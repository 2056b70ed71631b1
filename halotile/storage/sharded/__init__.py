"""Sharded Zarr arrays: metadata, codecs, readers, and writing of whole shards."""
