"""Denoisers and other functions of images on tiles: tensors in, tensors out."""
