"""Variational inference of images in the memory of the ranks, as ``halotile.posterior``; see :mod:`halotile.tasks.posterior.variational`."""

from halotile.tasks.posterior.correlated_field import CorrelatedField
from halotile.tasks.posterior.correlated_field import GaussianLikelihood as Gaussian
from halotile.tasks.posterior.correlated_field import PoissonLikelihood as Poisson
from halotile.tasks.posterior.variational import Samples, VariationalState, optimize_kl

__all__ = ["CorrelatedField", "Gaussian", "Poisson", "Samples", "VariationalState", "optimize_kl"]
