"""Ptychographic scans: read from CXI files, stored as one Zarr group of patterns, positions and geometry. Physics is in tasks/ptychography."""
