"""What brings workers from elsewhere, a piece for each: jobs of a batch system, steps of an allocation, and who replaces them."""
