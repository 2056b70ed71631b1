"""Process groups: ranks of a program that exchange tensors through torch.distributed, and how they find each other. Never Dask."""
