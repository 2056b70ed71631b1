"""Photon noise of the image that a job denoises: given or estimated, and how the denoiser takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise.image.opening import Levels, plane_values
from halotile.graphs.jobs.denoise.job import Denoising, NoiseModel
from halotile.graphs.jobs.denoise.rules import noise_of_camera, noise_of_denoiser
from halotile.graphs.kinds.sections import Tile
from halotile.graphs.plans.notes import place_text, plane_word, planes_text, values_text
from halotile.graphs.plans.trials.receptive_field import Halo, resolve_halo
from halotile.graphs.rules.combinations import apply_rules
from halotile.graphs.words import dotted
from halotile.storage.rim import Readable
from halotile.storage.views import PlaneValues
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.common.photon_denoiser import ROUNDS, for_photon_noise
from halotile.tasks.noise.photon_noise import PhotonNoise, estimate_photon_noise
from halotile.tasks.noise.survey import PlaneSurvey
from halotile.tasks.roles import Roles

MODEL: Literal["poisson-gaussian"] = "poisson-gaussian"
NAMED_PLANES = 6
"""Planes that a note names."""


@dataclass(frozen=True)
class Photons:
    """Photon noise of each plane, or of all."""

    noise: PhotonNoise
    """In the units of the file: a number for each index of the looped axes, or one."""
    white: float
    """The value that the denoiser sees as 1."""
    is_given: bool

    def sides(self, roles: Roles) -> dict[str, PlaneValues]:
        """Return the side inputs of planes that differ."""
        if self.noise.gain.size == 1:
            return {}
        return {
            "gain": plane_values(self.noise.gain, roles),
            "variance": plane_values(self.noise.variance, roles),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the part of the identity of a job."""
        return {**self.noise.to_json(), "estimated": not self.is_given}

    def in_rounds(self, denoiser: Denoiser, halo: Halo, tile: Tile, dims: int) -> tuple[Denoiser, Halo]:
        """Return the denoiser for this noise, and its halo from that of the denoiser itself."""
        around = for_photon_noise(denoiser, self.noise, self.white)
        wide = resolve_halo(tile, around, dims)
        origin = wide.origin if tile.depth != "auto" else f"{ROUNDS} rounds, {halo.origin}"
        kept = replace(halo, depth=wide.depth, origin=origin, notes=(*halo.notes, *wide.notes))
        return around, kept

    def note(self, roles: Roles) -> str:
        """Return the noise as a sentence.

        Examples
        --------
        >>> noise = PhotonNoise.of(np.array(2.0), np.array(-191.0))
        >>> Photons(noise, 255.0, is_given=False).note(Roles(("y", "x"), (0, 1), None))
        'photon noise of gain 2, offset 95.5 and read noise 0, estimated from the whole image: denoised in 3 rounds'
        """
        noise = self.noise
        numbers = (noise.gain, noise.offset, noise.read_sigma)
        gain, offset, read = (values_text(each, roles) for each in numbers)
        origin = ", as given" if self.is_given else planes_text(noise.gain, roles)
        constant = (
            [tuple(map(int, place)) for place in np.argwhere(noise.gain == 0)] if noise.gain.ndim else []
        )
        named = [
            f"{place_text(roles, place)} shows no photon noise: taken as constant, {noise.read_sigma[place]:.4g}"
            for place in constant[:NAMED_PLANES]
        ]
        more = [f"so do {len(constant) - NAMED_PLANES} more"] if len(constant) > NAMED_PLANES else []
        rounds = f"photon noise of gain {gain}, offset {offset} and read noise {read}{origin}: denoised in {ROUNDS} rounds"
        return "; ".join((rounds, *named, *more))


def choose_photon_noise(
    job: Denoising,
    denoiser: Denoiser,
    source: Readable,
    roles: Roles,
    values: tuple[float, float] | None,
    previous: Mapping[str, Any] | None,
) -> Photons | None:
    """Return the photon noise of each plane; None where noise does not depend on brightness.

    A resumed run keeps the estimate that it began with.
    """
    wanted = job.noise
    for place, message in _faults(job, denoiser, wanted).items():
        raise ConfigError(f"{dotted(place)}: {message}.")
    if wanted.model == "gaussian" or _faults(job, denoiser, replace(wanted, model=MODEL)):
        return None
    white = values[1] if values else 1.0
    if not isinstance(wanted.gain, str):
        numbers = map(np.float64, (wanted.gain, wanted.offset, wanted.read_sigma))
        return Photons(PhotonNoise(*map(np.asarray, numbers)), white, is_given=True)
    known = previous["identity"].get("noise") if previous else None
    if known and known["estimated"]:
        kept = PhotonNoise.from_json(known)
        if kept.gain.shape == tuple(source.shape[i] for i in roles.looped):
            return Photons(kept, white, is_given=False)
    is_auto = wanted.model == "auto"
    if is_auto and previous and "noise" in previous["identity"]:
        return None
    channels = [axis for axis in roles.looped if roles.axes[axis] == "c"]
    found = estimate_photon_noise(source, roles.spatial, roles.looped, apart=channels, clearly=is_auto)
    if found is None and is_auto:
        return None
    if found is None:
        raise ConfigError(
            "noise.model is poisson-gaussian without a gain, and samples of the image do not show noise that grows with brightness. "
            "Write noise.gain, in units of the file for each photon, or model: gaussian."
        )
    return Photons(found, white, is_given=False)


def _faults(job: Denoising, denoiser: Denoiser, noise: NoiseModel) -> Mapping[tuple[str | int, ...], str]:
    """Return the faults of a noise model for this job."""
    parts = {"noise": noise, "denoiser": denoiser, "input": job.input}
    return apply_rules((noise_of_camera, noise_of_denoiser), parts)


def remark_on_noise(
    job: Denoising,
    denoiser: Denoiser,
    planes: Sequence[PlaneSurvey],
    roles: Roles,
    levels: Levels | None,
) -> tuple[str, ...]:
    """Return a remark on noise that clearly grows with brightness, where one level is estimated for each plane."""
    if levels is None or _faults(job, denoiser, NoiseModel(model=MODEL)):
        return ()
    if not (growing := [place_text(roles, plane.place) for plane in planes if plane.grows]):
        return ()
    where = ""
    if len(growing) < len(planes):
        more = " and others" if len(growing) > NAMED_PLANES else ""
        where = f" in {'; '.join(growing[:NAMED_PLANES])}{more}"
    plane = plane_word(
        "".join(roles.axes[i] for i, n in zip(roles.looped, levels.shape, strict=True) if n > 1)
    )
    one_by_one = f", {plane} by {plane}" if levels.size > 1 else ""
    return (
        f"the noise grows with brightness{where}, as that of counted photons does, and one level is taken for dark and bright alike. If "
        f"photons are counted, write noise: {{model: {MODEL}}}, or compare the two with `recon-cli try`{one_by_one}",
    )


def decided_noise(wanted: NoiseModel, photons: Photons | None) -> dict[str, Any]:
    """Return the keys of the noise model that were decided."""
    if photons is None:
        return {"model": "gaussian"}
    is_one = photons.noise.gain.size == 1
    return {"model": MODEL} | {
        name: float(np.ravel(v)[0]) for name, v in photons.noise.to_json().items() if is_one
    }
