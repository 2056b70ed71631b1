"""The torch-facing side of ``distribute``: tensors in, tensors out, the work done elsewhere."""
