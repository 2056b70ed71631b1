"""The image that a job denoises, as its file and the job describe it: axes, holes, noise, channels. Sizes and memory are elsewhere."""
