"""Ptychography on one rank: the model of patterns with its gradients, the order of batches, steps and checkpoints. Files of scans are in storage/scans."""
