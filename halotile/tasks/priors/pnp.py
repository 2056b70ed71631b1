"""A denoiser as a prior: plug and play, and regularization by denoising."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from halotile.errors import ConfigError
from halotile.storage.rim import Readable
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.operators.sum import Total
from halotile.tasks.options import check_above_zero, with_description
from halotile.tasks.priors.base import DenoisingPrior


@dataclass(frozen=True, kw_only=True)
class Plugged(DenoisingPrior):
    """A denoiser in place of a prox (plug and play), or ``weight (x - D(x))`` in place of a slope (RED, solver gd).

    ``denoiser``: a denoiser as in a denoising job; ``sigma``: the noise level that the denoiser is given; ``weight``: weight of the slope, against
    1 / noise_sigma² for a measurement; a prox has none.

    References
    ----------
    S. Venkatakrishnan et al., Plug-and-play priors for model based reconstruction, GlobalSIP 2013.
    Y. Romano et al., The little engine that could: regularization by denoising, SIAM J. Imaging Sci. 10 (2017).
    """

    name: ClassVar[str] = "pnp"
    weighs_prox: ClassVar[bool] = False

    denoiser: Denoiser = field(metadata=with_description("a denoiser: {name: dncnn, weights: w.safetensors}, say"))
    sigma: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_above_zero("weight", self.weight)
        if self.sigma is not None:
            check_above_zero("sigma", self.sigma)
        denoiser = self.computed_by()
        if denoiser.wants_noise_level:
            raise ConfigError("sigma is not given, and the denoiser needs it. Write sigma: 0.05, say.")
        if denoiser.scale != 1 or denoiser.channels != (1, 1):
            raise ConfigError(
                f"denoiser: {denoiser.title} makes another shape of an image, or takes several channels. "
                "Use one that gives one pixel for each pixel."
            )

    def computed_by(self) -> Denoiser:
        """The denoiser, with the noise level set."""
        return self.denoiser if self.sigma is None else self.denoiser.with_noise_level(self.sigma)

    def prox(self, image: Readable, step: float) -> Readable:
        """``D(x)``, whatever the step."""
        return replace(self.planned, source=image)

    def slope(self, image: Readable) -> Readable:
        """``weight (x - D(x))``."""
        return Total((image, replace(self.planned, source=image)), (self.weight, -self.weight))

    def steepness(self) -> float:
        """Twice the weight: a nonexpansive denoiser may reverse the difference of two images."""
        return 2 * self.weight


PRIOR = Plugged
