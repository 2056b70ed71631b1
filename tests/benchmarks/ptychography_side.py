"""Programs of CDTools and pty-chi: ``python ptychography_side.py NAME REQUEST``, the request as JSON.

Each writes objects and places as they were after some epochs, and the seconds that the epochs until then took, into a file. Adam and rPIE
are as their makers recommend them; torch has the number of threads that is asked for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEED = 0


def write(path: str, records: list[dict[str, Any]]) -> None:
    """Write what was recorded."""
    arrays: dict[str, Any] = {name: np.array([record[name] for record in records]) for name in records[0]}
    np.savez(path, **arrays)


def recorded(
    epochs: Iterator[Any], every: int, state: Callable[[], dict[str, Any]], seconds: float | None
) -> list[dict[str, Any]]:
    """States after some epochs each, with the time that was spent on the epochs, until that is over."""
    records: list[dict[str, Any]] = []
    spent, began = 0.0, time.perf_counter()
    for number, loss in enumerate(epochs, 1):
        spent += time.perf_counter() - began
        if number % every == 0:
            records.append({"epoch": number, "loss": float(loss), "seconds": spent, **state()})
        if seconds is not None and spent > seconds:
            break
        began = time.perf_counter()
    return records


def cdtools(request: dict[str, Any]) -> list[dict[str, Any]]:
    """``FancyPtycho`` with Adam on a CXI file."""
    from cdtools.datasets import Ptycho2DDataset
    from cdtools.models import FancyPtycho
    from cdtools.reconstructors import AdamReconstructor
    from cdtools.tools.interactions import translations_to_pixel

    torch.manual_seed(SEED)
    dataset = Ptycho2DDataset.from_cxi(request["cxi"])
    model = FancyPtycho.from_dataset(dataset, n_modes=request["modes"], **request.get("model", {}))
    if not request.get("positions", True):
        model.translation_offsets.requires_grad = False
    if (device := request.get("device", "cpu")) != "cpu":
        model.to(device=device)
        dataset.get_as(device=device)
    reconstructor = AdamReconstructor(model, dataset)

    def epochs() -> Iterator[float]:
        for stage in request["stages"]:
            yield from reconstructor.optimize(
                stage["epochs"], lr=stage["lr"], batch_size=stage["batch"],
                schedule=stage.get("schedule", False), thread=False,
            )  # fmt: skip

    def state() -> dict[str, Any]:
        if request.get("only_times"):
            return {}
        places = translations_to_pixel(model.obj_basis, dataset.translations) - model.min_translation
        places = places + model.translation_scale * model.translation_offsets
        return {"object": model.obj.detach().numpy().copy(), "places": places.detach().numpy().copy()}

    return recorded(epochs(), request.get("every", 1), state, request.get("seconds"))


def ptychi(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Adam by automatic differentiation, or rPIE, on patterns and a first probe in a file."""
    import ptychi.api as api
    from ptychi.api.task import PtychographyTask
    from ptychi.utils import get_suggested_object_size, orthogonalize_initial_probe

    given = np.load(request["data"])
    places = given["places"] - given["places"].mean(0)
    probe = torch.from_numpy(np.repeat(given["probe"][None, None], request["modes"], 1))
    if request["modes"] > 1:
        probe = orthogonalize_initial_probe(probe)
    shape = get_suggested_object_size(places, probe.shape[-2:], extra=20)
    is_adam = request["solver"] == "adam"
    options: Any = api.AutodiffPtychographyOptions() if is_adam else api.RPIEOptions()
    options.data_options.data = given["patterns"]
    options.data_options.wavelength_m = 1e-10
    options.object_options.initial_guess = torch.ones(1, *shape, dtype=torch.complex64)
    options.object_options.pixel_size_m = 1e-8
    options.probe_options.initial_guess = probe
    options.probe_position_options.position_y_px, options.probe_position_options.position_x_px = places.T
    options.probe_position_options.optimizable = request.get("positions", True)
    if is_adam:
        for part, share in (("object_options", 1.0), ("probe_options", request["probe_rate"])):
            getattr(options, part).optimizer = api.Optimizers.ADAM
            getattr(options, part).step_size = share * request["lr"]
        options.probe_position_options.optimizer = api.Optimizers.ADAM
        options.probe_position_options.step_size = request["lr"]
    options.reconstructor_options.batch_size = request["batch"]
    options.reconstructor_options.num_epochs = request["epochs"]
    options.reconstructor_options.default_device = api.Devices.CPU
    options.reconstructor_options.random_seed = SEED
    task = PtychographyTask(options)

    def epochs() -> Iterator[float]:
        for _ in range(request["epochs"]):
            task.run(1)
            yield 0.0

    def state() -> dict[str, Any]:
        found = task.get_data_to_cpu("probe_positions", as_numpy=True)
        first = found + (np.array(shape) - probe.shape[-2:]) / 2
        return {"object": task.get_data_to_cpu("object", as_numpy=True)[0].copy(), "places": first}

    return recorded(epochs(), request.get("every", 1), state, request.get("seconds"))


if __name__ == "__main__":
    name, asked = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(asked["threads"])
    Path(asked["result"]).unlink(missing_ok=True)
    write(asked["result"], {"cdtools": cdtools, "ptychi": ptychi}[name](asked))
