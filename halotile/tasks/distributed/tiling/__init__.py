"""Denoisers and other functions of images, applied tile by tile."""
