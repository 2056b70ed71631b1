"""Tensors that are cut along an axis among ranks: exchange, halos, Fourier transforms, networks. Public names are in the modules beside this folder."""
