"""Variational inference: samples of the posterior of any torch model, for images that the ranks hold in memory.

Examples
--------
>>> import torch
>>> from halotile import posterior
>>> field = posterior.CorrelatedField((16, 16), offset=3.0, fluctuations=(0.5, 0.2))
>>> counts = torch.poisson(field(field.start(seed=1)), generator=torch.Generator().manual_seed(0))
>>> states = posterior.optimize_kl(field, posterior.Poisson(counts), field.start(), iterations=2, samples=2)
>>> *_, state = states
>>> mean, std = state.samples.mean_and_std()
>>> state.iteration, len(state.samples), mean.shape, bool((std > 0).all())
(2, 4, torch.Size([16, 16]), True)
"""

from halotile.tasks.posterior.correlated_field import CorrelatedField
from halotile.tasks.posterior.correlated_field import GaussianLikelihood as Gaussian
from halotile.tasks.posterior.correlated_field import PoissonLikelihood as Poisson
from halotile.tasks.posterior.residuals import Likelihood
from halotile.tasks.posterior.variational import Samples, VariationalState, optimize_kl

__all__ = ["CorrelatedField", "Gaussian", "Likelihood", "Poisson", "Samples", "VariationalState", "optimize_kl"]
