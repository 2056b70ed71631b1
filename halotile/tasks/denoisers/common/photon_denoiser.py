"""A denoiser of white noise as one of photon noise."""

from dataclasses import dataclass
from typing import Any, cast

from halotile.tasks.denoisers.base import Around, Denoiser, Model
from halotile.tasks.noise.photon_noise import PhotonNoise

ROUNDS = 3  # number of times that the denoiser is applied
BYTES_PER_PIXEL = 40.0  # mixture, estimate, their transform and temporaries, gain, variance and noise level of a tile


def for_photon_noise(denoiser: Denoiser, noise: PhotonNoise, white: float) -> Denoiser:
    """The denoiser for an image with photon noise, which takes side inputs ``gain`` and ``variance`` where planes differ.

    ``denoiser``: with a noise level as a side input; ``noise``: noise of the image, in its own units; of its first plane where they differ;
    ``white``: value of the image that the denoiser sees as 1.

    >>> import numpy as np
    >>> from halotile.tasks.denoisers.tv import TotalVariation
    >>> noise = PhotonNoise.from_values(np.array(1.0), np.array(0.0))
    >>> denoiser = for_photon_noise(TotalVariation(strength=1.0, sigma="auto"), noise, 255.0)
    >>> denoiser.title, denoiser.receptive_field()
    ('tv', 60)
    """
    first: Any = (part.flat[0] for part in noise)
    return cast(Denoiser, PhotonDenoiser(denoiser, PhotonNoise(*first), white))


@dataclass(frozen=True)
class PhotonDenoiser(Around):
    """The denoiser in rounds."""

    noise: PhotonNoise  # of the image, or of its first plane where they differ
    white: float
    side_inputs = ("gain", "variance")
    wants_noise_level = False

    def receptive_field(self) -> int | None:
        reach = self.inner.receptive_field()
        return None if reach is None else ROUNDS * reach

    def bytes_per_pixel(self) -> float:
        return self.inner.bytes_per_pixel() + BYTES_PER_PIXEL

    def around(self, model: Model) -> Model:
        from halotile.tasks.denoisers.common.anscombe import PhotonRounds

        gain, variance = float(self.noise.gain), float(self.noise.variance)
        rounds: Model = PhotonRounds(model, gain, variance, self.white, keeps_mean=self.inner.keeps_mean)
        return rounds
