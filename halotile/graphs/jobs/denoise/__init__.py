"""The job ``denoise``: a denoiser applied to every block of an image."""
