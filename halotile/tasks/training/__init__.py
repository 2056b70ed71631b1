"""Training of denoisers on noisy images: patches, methods, and the program of a rank."""
