"""``map_overlap`` on stored arrays, as Dask arrays. Jobs do not come by here."""
