"""Trials of a denoiser before a job: receptive field, exactness, tile and batch for a GPU."""
