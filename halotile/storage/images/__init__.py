"""Export of images as PNG and TIFF."""
