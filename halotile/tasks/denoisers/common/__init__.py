"""What several denoisers share: layers of networks, and files of weights."""
