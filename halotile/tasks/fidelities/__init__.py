"""Data fidelities, one file each: distances between a measurement and the forward of an image, pixel by pixel."""
