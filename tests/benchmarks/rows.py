"""The bars: what is compared with what, and what has to come out."""

from __future__ import annotations

from tests.benchmarks import bars
from tests.benchmarks.bars import Figure, Ratio
from tests.benchmarks.choosing import CHOOSING_ROWS
from tests.benchmarks.filters import FILTER_ROWS
from tests.benchmarks.photons import PHOTON_ROWS
from tests.benchmarks.ptychography import FEW_ROWS, KNOWN_ROWS, PTYCHOGRAPHY_ROWS
from tests.benchmarks.ranks import RANK_ROWS
from tests.benchmarks.samples import SAMPLES_FIGURES, SAMPLES_RATIOS
from tests.benchmarks.training import FULL, LONG, QUICK
from tests.benchmarks.transforms import FFT_ROWS
from tests.benchmarks.variational import VARIATIONAL_ROWS

RATIOS = [
    *SAMPLES_RATIOS,
    Ratio("box", "box filter 8192², job / stock `map_overlap` → Zarr", "denoising.ours_box", "denoising.stock box", 8192, 0.22),
    Ratio("box", "box filter 8192², job / plain one-process copy, same layout and codecs", "denoising.ours_box", "denoising.copy", 8192, 0.6),
    Ratio("cnn", "7-layer 32-channel CNN 4096², job / stock `map_overlap` → Zarr", "denoising.ours_cnn", "denoising.stock cnn", 4096, 0.58),
    Ratio("cnn", "the same / best bare torch forward over tiles in RAM", "denoising.ours_cnn", "denoising.bare_cnn", 4096, 1.0),
    Ratio("cnn", "the same / deepinv.distributed, 2 processes, patch 256, overlap 32", "denoising.ours_cnn", "denoising.deepinv_cnn", 4096, 0.60),
    Ratio("cnn", "the same / deepinv.distributed at its defaults 256/64", "denoising.ours_cnn", "denoising.deepinv_cnn 256 64", 4096, 0.40),
    Ratio("cnn", "the same / MONAI sliding window, least overlap", "denoising.ours_cnn", "denoising.monai_cnn", 4096, 0.62),
    Ratio("cnn", "the same / MONAI sliding window, its default overlap", "denoising.ours_cnn", "denoising.monai_cnn 0.25", 4096, 0.62),
    Ratio("levels", "copy of 8192² as a job, in resolution levels / at full resolution alone", "denoising.copied levels", "denoising.copied", 8192, 1.35, repeats=5),
    Ratio("levels", "7-layer 32-channel CNN 4096², in resolution levels / at full resolution alone", "denoising.ours_cnn 2 1 levels", "denoising.ours_cnn", 4096, 1.10, repeats=5),
    Ratio("scaling", "the same network, weak scaling: 2 · 4096² pixels with 2 workers / 4096² with 1 (efficiency ≥ 0.9)", "denoising.ours_cnn 2 2", "denoising.ours_cnn 1", 4096, 1.11, 5),
    Ratio("stack", "AᵀA of 8 circular blurs 5×5…15×15 at 2048², exact / deepinv.distributed, 2 processes", "stacks.ours exact", "stacks.deepinv_distributed", 2048, 0.15),
    Ratio("stack", "the same, fast", "stacks.ours fast", "stacks.deepinv_distributed", 2048, 0.05),
    Ratio("stack", "the same, operators on whole images as tasks, and a tree", "stacks.ours tree", "stacks.deepinv_distributed", 2048, 0.35),
    *(Ratio("stack", f"the same, {way}: peak of one worker above its imports", f"stacks.ours {way}", "stacks.deepinv_distributed", 2048, 0.3, figure="peak_bytes") for way in ("exact", "fast")),
    Ratio("pnp", "PnP, 3 circular blurs and the CNN, 4096², Zarr to Zarr, exact, an iteration / the loop by hand in RAM", "reconstructions.ours exact", "reconstructions.by_hand", 4096, 0.30),
    Ratio("pnp", "the same, normal form", "reconstructions.ours normal", "reconstructions.by_hand", 4096, 0.30),
    Ratio("pnp", "the same, normal form / the loop by hand, the network channels last", "reconstructions.ours normal", "reconstructions.by_hand last", 4096, 0.45),
    Ratio("fusing", "the same with a gaussian for the CNN, normal form / operators one by one, two passes", "reconstructions.ours gaussian", "reconstructions.ours gaussian_unfused", 4096, 0.4),
    Ratio("fusing", "the same, normal form with a checkpoint every two iterations / operators one by one, two passes", "reconstructions.ours gaussian_pairs", "reconstructions.ours gaussian_unfused", 4096, 0.4),
    Ratio("fusing", "bytes read and written, operators one by one, one pass / two", "reconstructions.ours gaussian_fused", "reconstructions.ours gaussian_unfused", 4096, 0.75, figure="iteration_bytes"),
    *(Ratio(*row) for row in FILTER_ROWS),
    *(Ratio(*row) for row in FFT_ROWS + RANK_ROWS + PTYCHOGRAPHY_ROWS + KNOWN_ROWS),
    *(Ratio(*row) for row in (*FEW_ROWS, *VARIATIONAL_ROWS)),
    *(Ratio(*row) for size in (FULL, LONG, QUICK) for row in size.rows()),
]  # fmt: skip


FIGURES = [
    *SAMPLES_FIGURES,
    Figure("memory", "peak memory of all processes, growth from 4096² to 16384²", bars.memory_growth("denoising.ours_gaussian"), "MB", 40),
    Figure("noop", "orchestration for each no-op block, 10⁵ blocks", bars.noop(10**5, "per_block_ms"), "ms", 0.06),
    Figure("noop", "the same, 10⁶ blocks", bars.noop(10**6, "per_block_ms"), "ms", 0.06),
    Figure("noop", "growth of all processes over 10⁵ blocks", bars.noop(10**5, "grown_mb"), "MB", 40),
    Figure("noop", "growth of all processes over 10⁶ blocks", bars.noop(10**6, "grown_mb"), "MB", 40),
    Figure("noop", "submit to first answer of a job of 10⁶ blocks", bars.noop(10**6, "first_s"), "s", 0.3),
    Figure("checks", "copy of 16384²: its digests and its checks of input and output, of its time", bars.checks, "%", 1, 5),
    Figure("trials", "`recon-cli plan` of a network not seen before: 5 layers of 8 channels", bars.planned("tests.networks:convolutions", layers=5, width=8), "s", 2, 5),
    Figure("trials", "the same, a U-Net of 1.9 million weights that looks 51 pixels far", bars.planned("tests.benchmarks.unets:plain_unet"), "s", 10, 5),
    Figure("trials", "the same, a residual U-Net of 2 million weights that looks 185 pixels far", bars.planned("tests.benchmarks.unets:residual_unet", width=16), "s", 10, 5),
    Figure("start", "`recon-cli run`, a gaussian on 2048², 2 workers: more than `import torch`", bars.beyond_torch(bars.gaussian_run), "s", 1.5, 7),
    Figure("start", "`recon-cli plan` of a network not seen before, 5 layers of 8 channels: more than `import torch`", bars.beyond_torch(bars.planned("tests.networks:convolutions", layers=5, width=8)), "s", 1, 7),
    Figure("start", "`recon-cli plan` of the same again", bars.planned("tests.networks:convolutions", again=True, layers=5, width=8), "s", 1, 7),
    Figure("start", "`recon-cli plan` of `dncnn` with weights of that size again", bars.trained_network_planned_again, "s", 1, 7),
    Figure("start", "`recon-cli --help`", bars.start_up("--help"), "s", 0.5, 7),
    Figure("start", "`recon-cli validate`", bars.start_up("validate", "JOB"), "s", 0.5, 7),
    Figure("growth", "PnP with the CNN: peak of a worker, growth from 4096² to 16384²", bars.memory_growth("reconstructions.ours twice"), "MB", 60, 1),
    *(Figure("photons", *row, 1) for row in PHOTON_ROWS),
    *CHOOSING_ROWS,
    Figure("petra", "the same: loss after CDTools' own recipe", lambda folder: bars.program("ptychography.ours_petra_loss", folder, 0)["loss"], "(root of counts)²", 6, 1),
    Figure("few", "the same: error of the positions", lambda folder: bars.program("ptychography.ours_few", folder, 0)["positions"], "pixels", 0.2, 1),
    Figure("streamed", "a scan: peak memory of the largest process of a job in its first 90 s, growth from 2 GB to 16 GB of patterns", bars.streamed_growth("largest"), "MB", 60, 1),
    Figure("streamed", "the same of all processes together", bars.streamed_growth("total"), "MB", 60, 1),
]  # fmt: skip

GROUPS = {
    "denoise": ("box", "cnn", "scaling", "memory", "noop", "checks", "trials"),
    "filters": ("start", "gaussian", "vips", "kernels", "large-medians", "filters"),
    "images": ("levels", "photons"),
    "torch": ("fft", "ranks"),
    "ptychography": ("petra", "errors", "few", "slots", "windows", "streamed"),
    "reconstruct": ("stack", "pnp", "fusing", "growth", "samples"),
}
"""The tables, and the cases of each."""
LONG_GROUPS = {"choosing": ("choosing",), "variational": ("variational",)} | {
    f"training{size.suffix}": tuple(dict.fromkeys(case for case, *_ in size.rows())) for size in (FULL, LONG, QUICK)
}
"""Those that are measured by name alone."""
