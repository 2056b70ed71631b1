"""`recon-cli bench` compares numbers of workers on a job's own work, and leaves nothing behind; `recon-cli try` lays the results of settings side by side, names the best, and refuses in plain words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image
from skimage.data import camera

import halotile
from halotile.cli.config.loading import load_job
from halotile.errors import ConfigError, OutputRefused
from halotile.graphs import scaling
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.jobs.simulate.job import Simulation
from halotile.graphs.kinds.sections import Cluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.passes.stream import workers_of
from halotile.graphs.scaling import Scaling, TimedRun
from halotile.tasks.denoisers.common.layers import BlindUNet
from tests.cases import thorough
from tests.cli.engine import MonkeyPatch, ask, printed, refused

JOB = """\
version: 1
job: denoise
input: {path: a.npy}
output: {path: o.zarr, shard: 64, chunk: 32, levels: 1}
denoiser: {name: gaussian, sigma: 1.0}
tile: {block: 64}
run: {memory_per_worker: 2GiB}
"""


RECONSTRUCTION = """\
version: 1
job: reconstruct
output: {path: x.zarr, shard: 64, chunk: 32, levels: 1}
operators: [{name: blur, kernel: k.npy, boundary: circular, data: a.npy}]
prior: {name: pnp, denoiser: {name: gaussian, sigma: 0.5}}
solver: {name: pgd, iterations: 9, step: 0.5}
run: {memory_per_worker: 2GiB}
"""


TRAINING = """\
version: 1
job: train
input: {path: a.npy}
output: {path: w.safetensors}
network: {name: unet, width: 4}
patch: 32
batch: 4
run: {memory_per_worker: 3GiB}
"""


BLOCKS = 20


BLOCK_BYTES = 64 * 64 * 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).random((256, 320), np.float32))
    np.save(tmp_path / "k.npy", np.full((3, 3), 1 / 9, np.float32))
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "rec.yaml").write_text(RECONSTRUCTION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.cluster
def test_blocks_are_compared_in_turns_and_the_output_is_left_alone(folder: Path) -> None:
    zarr.create_array("o.zarr", shape=(3,), dtype="f4")
    Path("o.zarr.run").mkdir()
    Path("o.zarr.run/mine").write_text("mine")
    before = contents(folder)
    result = ask("bench", "job.yaml", "--workers", "2,1", "--trials", "2", "--blocks", "6", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    lines = [line.partition(":")[0] for line in result.stderr.splitlines() if line.startswith("trial")]
    assert lines == [f"trial {trial} of 2, {workers}" for trial in (1, 2) for workers in ("1 worker", "2 workers")]
    assert (found["unit"], found["blocks"], found["of_blocks"]) == ("block", 6, BLOCKS)
    one, two = found["workers"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert (one["speed_up"], one["efficiency"]) == (1, 1)
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"])
    assert two["efficiency"] == pytest.approx(two["speed_up"] / 2)
    for row in (one, two):
        assert 0 < row["least_seconds"] <= row["seconds"] <= row["most_seconds"] < row["start_seconds"]
        assert 0.5 < row["written_bytes"] / (BLOCK_BYTES * (2 + 6)) < 1.1
        assert row["peak_memory_bytes"] > 2**26
        assert row["losses"] == []
    assert one["read_bytes"] == two["read_bytes"] > 8 * BLOCK_BYTES
    assert found["largest_loss_difference"] is None
    assert contents(folder) == before
    assert not list(folder.glob(".*"))


@pytest.mark.cluster
def test_iterations_have_losses_of_the_same_bits_and_a_page(folder: Path) -> None:
    result = printed("bench", "rec.yaml", "--workers", "1,2", "--trials", "1", "--steps", "3", "--html", "p.html")
    assert "largest relative difference of a loss: 0: the same bits" in result
    assert "time per iteration" in result
    page = Path("p.html").read_text()
    assert len(re.findall(r'<div id="[\w-]+" data-root-id=', page)) == 2
    assert page.partition('<div class="wide"><table>')[2].count("<tr>") == 3
    assert "Scaling of rec.yaml" in page
    assert sorted(path.name for path in folder.iterdir()) == ["a.npy", "job.yaml", "k.npy", "p.html", "rec.yaml"]
    assert "--overwrite" in refused("bench", "rec.yaml", "--workers", "1", "--html", "p.html")


@pytest.mark.cluster
def test_training_is_measured_by_its_steps(folder: Path) -> None:
    (folder / "train.yaml").write_text(TRAINING)
    before = contents(folder)
    result = printed("bench", "train.yaml", "--workers", "1,2", "--trials", "1", "--steps", "3")
    assert "job train, 1 trial of 2 iterations after the first" in result
    assert "0: the same bits" in result
    times = r"\S+ s \(\S+ s( to \S+ s)?\)"
    assert re.search(rf"an epoch is 20 iterations: {times} with 1 worker, {times} with 2 workers", result)
    one, two = (re.split(r" {2,}", line.strip()) for line in result.splitlines()[3:5])
    assert one[6:9] == ["-", "-", "0 B"]
    assert two[6:8] == ["-", "-"]
    gradients = 4 * sum(parameter.numel() for parameter in BlindUNet(1, 4, 2).parameters())
    # In each of 3 steps, half of two slots and half of the sum, on both ranks.
    assert float(two[8].removesuffix(" KiB")) * 2**10 == pytest.approx(3 * 3 * gradients, rel=0.02)
    assert contents(folder) == before


@pytest.mark.thorough
@pytest.mark.cluster
@pytest.mark.parametrize(("number", "code"), [thorough(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_it_and_its_folder_is_removed(folder: Path, number: signal.Signals, code: int) -> None:
    before = contents(folder)
    program = [sys.executable, "-m", "halotile", "bench", "job.yaml", "--workers", "1,2", "--trials", "50"]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=environment) as started:
        deadline = time.monotonic() + 120
        try:
            while not list(folder.glob(".o.zarr.bench-*/o.zarr/0/c/*/*")):
                assert started.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            started.send_signal(number)
            message = started.communicate(timeout=60)[1]
        finally:
            started.kill()
    assert started.returncode == code, message
    assert "stopped" in message
    assert "Traceback" not in message
    assert contents(folder) == before
    assert not list(folder.glob(".*"))


MISTAKES = [
    ("job.yaml --workers 1,x", "Write them as 1,2,4"),
    ("job.yaml --workers 0", "each 1 or more"),
    ("job.yaml --trials 0", "--trials 0 is too few. Write 1 or more"),
    ("job.yaml --blocks 0", "--blocks 0 is too few"),
    ("job.yaml --steps 3", "no steps, and is measured by the block. Write --blocks"),
    ("rec.yaml --blocks 3", "measured by the iteration, each over all blocks. Write --steps"),
    ("rec.yaml --steps 1", "the first is not measured. Write 2 or more"),
    ("job.yaml --set output.path=s3://a/b.zarr", "Write another path"),
    ("job.yaml --set output.path=nowhere/b.zarr", "there is no folder"),
    ("job.yaml --set tile.block=auto --set output.shard=512", "the job is one block of"),
    ("job.yaml --set cluster.address=tls://127.0.0.1:9", "Write --cluster local"),
    ("job.yaml --html no/p.html", "no folder no"),
    ("job.yaml --html a.npy", "--overwrite"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_named_and_nothing_is_left(folder: Path, words: str, message: str) -> None:
    before = contents(folder)
    result = ask("bench", *words.split())
    assert (result.exit_code, "Traceback" in result.stderr) == (2, False), result.output
    assert message in result.stderr
    assert contents(folder) == before
    assert not list(folder.glob(".*"))


@pytest.mark.cluster
def test_a_failing_block_names_its_fault(folder: Path) -> None:
    pixels = np.load("a.npy")
    pixels[0, 0] = np.inf
    np.save("a.npy", pixels)
    result = refused("bench", "job.yaml", "--workers", "1", "--set", "run.on_nan=fail", code=4)
    assert "block 0" in result
    assert "events.jsonl" not in result


@pytest.mark.cluster
def test_what_workers_receive_from_one_another_is_counted(cluster: RunningCluster) -> None:
    client, (one, other) = cluster.client, sorted(workers_of(cluster.client))
    before = sum(client.run(scaling._received_bytes).values())
    big = client.submit(np.zeros, 10**6, workers=[one], pure=False)
    client.submit(np.sum, big, workers=[other], pure=False).result()
    assert sum(client.run(scaling._received_bytes).values()) - before == pytest.approx(8 * 10**6, rel=0.01)


def test_more_workers_than_cores_or_blocks_are_noted(folder: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "cores_here", lambda: 1)
    monkeypatch.setattr(scaling, "_run", lambda plan, *_: TimedRun(plan.run.count, 1.0, (1.0,), (), 0, 0, 0, 0, 0))
    words = "job.yaml --workers 1,12 --trials 1 --blocks 5 --set run.memory_per_worker=800MiB"
    result = printed("bench", *words.split())
    assert "12 workers share 1 core here" in result
    assert "12 workers share 5 blocks" in result


@pytest.mark.parametrize(("gpus", "fewer"), [((2, 3), (2,)), ("all", 1), (4, 1)])
def test_fewer_workers_on_gpus_are_fewer_gpus(folder: Path, gpus: Any, fewer: Any) -> None:
    plan = make_plan(load_job(Path("job.yaml")))
    plan = replace(plan, placement=replace(plan.placement, cluster=Cluster(kind="local-cuda", gpus=gpus)))
    one = scaling._with_workers(plan, 1)
    assert (one.run.count, one.cluster.gpus) == (1, fewer)


def test_losses_that_differ_show_the_largest_difference_and_measurements_are_moved() -> None:
    runs = [
        TimedRun(n, 1.0, (1.0,), tuple(enumerate(losses, 1)), 0, 0, 0, 0, 0)
        for n, losses in ((1, (8.0, 4.0)), (2, (8.0, 3.0)), (4, (8.0, 4.0, 1.0)))
    ]
    assert Scaling("reconstruct", "iteration", None, None, 1, runs).largest_difference == 0.25
    operators = tuple(OperatorChoice(name="blur", data=path) for path in ("a/y.zarr", "b/y.zarr"))
    moved = Simulation(operators=operators, reference="x.npy").moved_into("there")
    assert [operator.data for operator in moved.operators] == ["there/0-y.zarr", "there/1-y.zarr"]


NOISY_JOB = """\
version: 1
job: denoise
input: {path: a.npy}
output: {path: o.zarr}
denoiser: {name: tv, strength: 1.0, sigma: auto}
"""


@pytest.fixture
def photograph(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    noise = 15 * np.random.default_rng(0).standard_normal((200, 160))
    np.save(tmp_path / "a.npy", (camera()[60:260, 150:310] + noise).astype("f4"))
    (tmp_path / "job.yaml").write_text(NOISY_JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_combination_is_drawn_and_the_best_is_named(photograph: Path) -> None:
    lists = ("--set", "denoiser.name=tv,nlm", "--set", "denoiser.strength=0.2,0.8,8")
    result = printed("try", "job.yaml", "sheet.png", *lists)
    assert result.count("(SURE)") == 6
    assert " ".join(result.split()).count("% detected") == 6
    assert result.count("strength=8") == result.count("; the residual holds structure") == 2
    assert "--set denoiser.strength=0.8" in result.partition("suggested")[2]
    sheet = np.asarray(Image.open(photograph / "sheet.png")).astype(int)
    assert (sheet.shape > np.array([2 * 200, 4 * 160, 0])).all()
    assert sorted(path.name for path in photograph.iterdir()) == ["a.npy", "job.yaml", "sheet.png"]


def test_the_sheet_shows_the_pixels_with_one_contrast(photograph: Path) -> None:
    found = halotile.try_settings("job.yaml", {"denoiser.strength": [0.5, 1]}, "s.png", region="10:90,20:100")
    assert found.best.denoised.shape == (1, 80, 80)
    low, high = np.percentile(found.noisy, (0.5, 99.5))
    sheet = np.asarray(Image.open("s.png"))[..., 0]
    for image, (dark, bright) in ((found.noisy, (low, high)), (found.tried[1].denoised, (low, high)),
                                  (found.tried[0].residual, (-3, 3))):  # fmt: skip
        drawn = (np.clip((image[0] - dark) / (bright - dark), 0, 1) * 255).round().repeat(5, 0).repeat(5, 1)
        windows = np.argwhere((sheet[:-400, :-400] == drawn[0, 0]) & (sheet[399:-1, 399:-1] == drawn[-1, -1]))
        assert any(np.array_equal(sheet[y : y + 400, x : x + 400], drawn) for y, x in windows)


def test_no_setting_is_suggested_where_none_beats_the_noisy_crop(photograph: Path) -> None:
    (photograph / "job.yaml").write_text(NOISY_JOB.replace("tv, strength: 1.0, sigma: auto", "gaussian, sigma: 1.0"))
    lists = ("--set", "denoiser.sigma=8,12")
    result = ask("try", "job.yaml", "sheet.png", *lists)
    assert "no setting is better than the image as it is" in " ".join(result.stdout.split())
    assert "--set" not in result.stdout
    found = json.loads(ask("try", "job.yaml", *lists, "--json").stdout)
    assert min(entry["error"] for entry in found["settings"]) >= 1
    assert found["suggested"] is None


def test_correlated_noise_has_no_error_and_the_reason_is_given(photograph: Path) -> None:
    noise = 15 * np.random.default_rng(0).standard_normal((256, 256))
    np.save("a.npy", (camera()[:256, :256] + noise + np.roll(noise, 1, 1)).astype("f4"))
    lists = ("--set", "denoiser.strength=0.5,1")
    result = " ".join(printed("try", "job.yaml", "sheet.png", *lists).split())
    assert "error none can be estimated: the noise is correlated, by " in result
    assert "The likely cause is a readout or scan along x: train a network with structure: x" in result
    assert "suggested none: settings cannot be compared by their errors" in result
    assert "SURE" not in result
    found = json.loads(ask("try", "job.yaml", *lists, "--json").stdout)
    assert [entry["error"] for entry in found["settings"]] == [None, None]
    assert found["suggested"] is None
    assert found["noise_correlation"]["x"][0] == pytest.approx(0.5, abs=0.08)


def test_figures_for_programs(photograph: Path) -> None:
    result = ask("try", "job.yaml", "--json", "--set", "denoiser.strength=1,-1", "--region", "0:64,0:64")
    found = json.loads(result.stdout)
    assert found["place"] == {"y": [0, 64], "x": [0, 64]}
    (entry,) = found["settings"]
    assert entry["correlation"] == max(entry["correlations"].values())
    assert found["noise_correlation"] is None
    assert [entry["set"] for entry in found["settings"]] == [["denoiser.strength=1"]] == [found["suggested"]]
    assert [entry["set"] for entry in found["failed"]] == [["denoiser.strength=-1"]]
    assert result.stderr.startswith("not shown: strength=-1: ")


WRONG_SETTINGS = [
    ("job.yaml --set denoiser.name=tw,tx", "no denoiser is called"),
    ("job.yaml --set denoiser.strength=-1,-2", "none of 2 settings can be used"),
    ("job.yaml --set denoiser.name=median --set denoiser.size=3,5", "the name is median"),
    ("job.yaml --set denoiser.strength", "not a key and a value"),
    (f"job.yaml --set denoiser.strength={','.join(map(str, range(1, 60)))}", "make 59 settings"),
    ("job.yaml --region 5:9", "not rows and columns"),
    ("job.yaml --region 0:1,0:100", "1 × 100 pixels, too few"),
    ("job.yaml --region 0:9,0:9", "Take at least 16 × 16"),
    ("job.yaml --plane t=3", "the image's axes are yx"),
    ("job.yaml sheet.jpg", "a name that ends in .png"),
    ("job.yaml a.npy.png --set input.path=nothing.npy", "nothing.npy"),
    ("job.yaml nowhere/sheet.png", "no folder nowhere"),
    ("reconstruct.yaml", "only the settings of job: denoise"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_SETTINGS)
def test_mistakes_in_settings_are_named(photograph: Path, reconstruction: Path, words: str, message: str) -> None:
    result = ask("try", *words.split())
    assert result.exit_code in (2, 4)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_sheet_replaces_nothing_unasked_and_the_image_never(photograph: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), "u1")).save("scan.png")
    Path("sheet.png").write_text("mine")
    assert ask("try", "job.yaml", "sheet.png").exit_code == 2
    assert Path("sheet.png").read_text() == "mine"
    assert ask("try", "job.yaml", "sheet.png", "--overwrite").exit_code == 0
    before = Path("scan.png").read_bytes()
    assert "it is the image" in refused("try", "job.yaml", "scan.png", "--overwrite", "--set", "input.path=scan.png")
    assert Path("scan.png").read_bytes() == before


def test_a_script_lists_values_of_any_kind_for_many_images_too(photograph: Path, monkeypatch: MonkeyPatch) -> None:
    kinds = [{"name": "gaussian", "sigma": 1.0}, {"name": "median", "size": 3}]
    found = halotile.try_settings("job.yaml", {"denoiser": kinds})
    assert [tried.setting[0] for tried in found.tried] == [f"denoiser={json.dumps(kind)}" for kind in kinds]
    settings: dict[str, Any] = {"denoiser.name": "tv", "denoiser.iterations": np.int64(9)}
    settings["denoiser.strength"] = np.array([0.5, 1], "f4")
    assert len(halotile.try_settings("job.yaml", settings).tried) == 2
    Path("mine.png").touch()
    with pytest.raises(OutputRefused, match="overwrite=True"):
        halotile.try_settings("job.yaml", {}, "mine.png")
    for region, words in (("5:9", r"^region 5:9"), ((slice(0, 9),), r"region is \(slice.*0:512,1000:1512")):
        with pytest.raises(ConfigError, match=words):
            halotile.try_settings("job.yaml", {}, region=region)  # type: ignore[arg-type]
    np.save(photograph / "b.npy", np.load(photograph / "a.npy"))
    (photograph / "many.yaml").write_text(NOISY_JOB.replace("a.npy", '"*.npy"').replace("o.zarr", '"{stem}.zarr"'))
    many, one = (printed("try", name, "--set", "denoiser.strength=1,2", "--json") for name in ("many.yaml", "job.yaml"))
    assert json.loads(many) == json.loads(one)
    monkeypatch.setitem(sys.modules, "PIL.ImageFont", None)
    assert 'pip install "halotile[images]"' in refused("try", "job.yaml", "sheet.png")
    assert ask("try", "job.yaml").exit_code == 0


def test_each_channel_is_tried_and_the_lines_to_paste_make_a_job(photograph: Path) -> None:
    rng, image = np.random.default_rng(0), camera()[60:188, 150:278].astype("f4")
    stack = np.stack([image + 2 * rng.standard_normal(image.shape), image + 60 * rng.standard_normal(image.shape)])
    names = {"Name": ["DAPI", "Alexa 488"]}
    tifffile.imwrite("a.tif", stack.astype("f4"), ome=True, metadata={"axes": "CYX", "Channel": names})
    job = NOISY_JOB.replace("a.npy", "a.tif")
    Path("job.yaml").write_text(job)
    result = printed("try", "job.yaml", "sheet.png", "--set", "denoiser.strength=0.2,1.5")
    line = 'denoiser: {name: tv, strength: {DAPI: 0.2, "Alexa 488": 1.5}, sigma: auto}'
    assert result.rstrip().endswith(f"to paste      {line}")
    Path("pasted.yaml").write_text(job.replace(NOISY_JOB.splitlines()[-1], line))
    assert "Alexa 488: {name: tv, strength: 1.5, sigma: auto}" in printed("plan", "pasted.yaml")
    again = printed("try", "pasted.yaml", "--plane", "c=Alexa 488")
    assert "error" in again
    assert "c=1" in again
    found = halotile.try_settings(
        "job.yaml", {"denoiser": ["{name: tv, strength: 0.2, sigma: auto}", "{name: gaussian, sigma: 2}"]}
    )
    assert [one.place["y"] for one in found.channels.values()] == [(0, 128)] * 2
    assert found.written["denoiser"] == {"name": "tv", "strength": 0.2, "sigma": "auto"}
    assert found.written["channels"] == {"Alexa 488": {"name": "gaussian", "sigma": 2}}


def test_a_channel_that_cannot_be_compared_is_named_and_the_others_are_drawn(photograph: Path) -> None:
    rng, image = np.random.default_rng(0), camera()[60:188, 150:278].astype("f4")
    stack = np.stack([np.ones_like(image), *(image + sigma * rng.standard_normal(image.shape) for sigma in (10, 20))])
    tifffile.imwrite("a.tif", stack.astype("f4"), ome=True, metadata={"axes": "CYX", "Channel": {"Name": [*"ABC"]}})
    Path("job.yaml").write_text(NOISY_JOB.replace("a.npy", "a.tif"))
    lists = ("--set", "denoiser.strength=0.5,1", "--set", "denoiser.iterations=20")
    result = ask("try", "job.yaml", "sheet.png", *lists)
    assert result.exit_code == 0
    assert "not shown: channel A: " in result.stderr
    with Image.open("sheet.png") as sheet:
        assert sheet.size[0] > 3 * 128
    found = json.loads(ask("try", "job.yaml", *lists, "--json").stdout)
    assert [*found["channels"]] == ["B", "C"]
    assert "no noise can be estimated" in found["missing"]["A"]
