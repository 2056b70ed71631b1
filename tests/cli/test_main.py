"""Each command answers with the right words in the right place, and the right exit code, each error with one message; progress is a bar or plain lines."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from typer.main import get_command

from halotile import __version__, errors
from halotile.cli import exits, info
from halotile.cli.app import COMMANDS
from halotile.cli.exits import exit_code
from halotile.cli.main import app
from halotile.cli.screens.progress_report import LINE_SECONDS, Lines, Live, image
from halotile.cli.screens.progress_report import line as line_of
from halotile.graphs.kinds.base import Inspection
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.directory import RunDirectory
from tests.cases import thorough
from tests.cli.engine import BAD, ENDING, FIGURES, Engine, MonkeyPatch, ask, printed, refused, save_job
from tests.faults import run_python


def test_results_go_to_stdout_and_progress_to_stderr(config: Path, engine: Engine, monkeypatch: MonkeyPatch) -> None:
    result = ask("run", config)
    for words in ("400 of 400 done, 100 of them by an earlier run", "54.4 Mpix/s over 1 min 30 s", "512 MiB in one"):
        assert words in result.stdout
    assert re.search(r"time +\S+ s in total, \S+ s of it planning and 5.0 s starting", result.stdout)
    assert "400 blocks, depth 8 (declared by tv), 2 workers" in result.stderr
    assert "start  100 of 400 blocks (100 resumed)" in result.stderr
    assert "blocks" not in result.stdout.replace("blocks  ", "")
    assert "\x1b" not in result.output, "what goes into a pipe is plain text"
    found = json.loads(ask("run", config, "--json").stdout)
    assert (found["megapixels_per_second"], found["start_seconds"]) == (54.4, 5.0)
    assert found["total_seconds"] > found["plan_seconds"] > 0
    assert ask("run", config, "--quiet").output == ""
    for key in ("blocks", "workers"):
        monkeypatch.setitem(FIGURES, key, 1)
    assert "uint16 in 1 block, depth 8 (declared by tv), 1 worker\n" in ask("run", config).stderr
    engine.stands = errors.OutputRefused("output.path is clean.zarr: it already exists.")
    assert refused("run", config) == "error: output.path is clean.zarr: it already exists.\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_warning_is_shown_to_the_quiet_too(config: Path, engine: Engine, options: list[str]) -> None:
    found = Inspection({"residual": []}, [], ["the result is darker than the image"])
    engine.ends = replace(ENDING, inspection=found)
    result = ask("run", config, "--quiet", *options)
    assert (result.stderr, result.exit_code) == ("warning: the result is darker than the image\n", 0)
    assert "warning" not in result.stdout


def test_quarantined_blocks_are_named_and_exit_3(config: Path, engine: Engine) -> None:
    engine.ends = replace(ENDING, quarantined=(BAD, replace(BAD, error="ValueError: poisoned\nby hand")))
    result = ask("run", config, "--json")
    assert result.exit_code == 3
    named = "quarantined: block 7 (index (1, 2), region (0, 512)–(512, 1024)): "
    assert f"{named}not finite" in result.stderr
    assert result.stderr.endswith(f"{named}ValueError: poisoned\n"), "the first line of a long error"
    first, second = json.loads(result.stdout)["quarantined"]
    assert (first["region"], second["error"]) == ([[0, 512], [512, 1024]], "ValueError: poisoned\nby hand")


FAILURES = [
    (errors.BlockFailed("1 of 400 blocks failed"), 1, "error: 1 of 400 blocks failed\n"),
    (errors.OutputRefused("in use"), 2, "error: in use\n"),
    (errors.DamagedData("cut short"), 4, "error: cut short\n"),
    (errors.MemoryRefused("too big"), 5, "error: too big\n"),
    (errors.Stopped("stopped on SIGTERM"), 75, "\nstopped on SIGTERM\n"),
    (KeyboardInterrupt(), 130, "\nstopped; run again to resume\n"),
    (ValueError("x\ny"), 1, "error: unexpected ValueError: x y\nrun again with --debug for the traceback\n"),
]


@pytest.mark.parametrize(("error", "code", "message"), FAILURES)
@pytest.mark.parametrize("debug", [False, True])
def test_a_failing_run_ends_in_one_message(
    config: Path, engine: Engine, error: BaseException, code: int, message: str, debug: bool
) -> None:
    engine.ends = error
    result = refused("run", config, *(["--debug"] if debug else []), code=code)
    assert result.endswith(message)
    assert ("Traceback" in result) == debug


def test_a_plan_that_is_stopped_leaves_nothing_to_resume(config: Path, engine: Engine) -> None:
    engine.stands = KeyboardInterrupt()
    assert refused("plan", config, code=130).strip() == "stopped"


TRIED: dict[str, Any] = {
    "device": "NVIDIA X", "tile": [1024, 1024], "batch": 4, "records": False, "megapixels_per_second": 812.4, "device_bytes": 3 * 2**30,
    "free_bytes": 9 * 2**30, "host_bytes": 2**30, "block_pixels": 4096**2,
    "tried": [
        {"tile": [512, 512], "batch": 16, "seconds": 0.04, "batch_bytes": 2**30},
        {"tile": [1024, 1024], "batch": 4, "seconds": 0.02, "batch_bytes": 2**31},
    ],
    "precisions": [
        {"name": "float32", "seconds": 0.02, "error": 2.5e-7, "why_not": ""},
        {"name": "float16", "seconds": 0.01, "error": None, "why_not": "NaN in places"},
        {"name": "bfloat16", "seconds": None, "error": None, "why_not": "no room"},
    ],
}  # fmt: skip


CARD = {"device": "cuda", "device_memory_bytes": 3 * 2**30, "tuned": TRIED, "tile": [1024, 1024], "batch": 4}


FEWER = {"tile": [1024, 1024], "batch": 2, "seconds": 0.03, "batch_bytes": 2**30}


SHOWN: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    ({}, 0, (
        "blocks 400 of 4,096 × 4,096", "depth 8 pixels, declared by tv", "read 1.01 × the image", "note a note", "workers 2",
        "memory 768 MiB at the peak in each worker, of 4 GiB allowed", "disk up to 9.1 GiB of output, no scratch; 93.1 GiB free",
    )),
    ({}, 120, ("blocks 400 of 4,096 × 4,096; 120 are done already",)),
    ({"scratch_bytes": 2**20}, 0, ("disk up to 9.1 GiB of output and 1 MiB of scratch; 93.1 GiB free",)),
    (CARD, 0, (
        "tiles 1,024 × 1,024, 4 at once: the fastest of 2 tried on NVIDIA X, 812 Mpix/s there",
        "GPU memory 3 GiB at the peak in each worker, of 9 GiB that are free for it",
        "tiles 512 × 512, 16 at once 419 Mpix/s, 1 GiB for them",
        "1,024 × 1,024, 4 at once 839 Mpix/s, 2 GiB for them (chosen)",
        "precision float32 839 Mpix/s, error 2.5e-07", "float16 1.7 Gpix/s, NaN in places", "bfloat16 no room",
    )),
    # A resumed run may have a smaller batch, which was not chosen.
    (CARD | {"tuned": TRIED | {"tried": [*TRIED["tried"], FEWER]}, "batch": 2}, 0, ("tiles 1,024 × 1,024, 2 at once",)),
]  # fmt: skip


@pytest.mark.parametrize(("figures", "done", "lines"), SHOWN)
def test_plan_prints_its_figures(
    config: Path, engine: Engine, figures: dict[str, Any], done: int, lines: tuple[str, ...],
    monkeypatch: MonkeyPatch,
) -> None:  # fmt: skip
    engine.stands = done
    for key, value in figures.items():
        monkeypatch.setitem(FIGURES, key, value)
    shown = [" ".join(line.split()) for line in printed("plan", config, "--probe").splitlines()]
    assert [line for line in lines if line not in shown] == []


def test_plan_tells_which_cluster_was_chosen(config: Path, engine: Engine, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HALOTILE_CLUSTER", raising=False)
    text = printed("plan", config, "--cluster", "auto")
    assert "2, on cluster local (no GPU: CUDA_VISIBLE_DEVICES shows none)" in text


def test_the_words_of_a_run_do_for_its_plan(config: Path, engine: Engine) -> None:
    options = "--workers 5 --set tile.size=128 --set run.retries=0 --fresh --same-input --allow-import --no-dashboard"
    for command in ("plan", "run"):
        printed(command, config, *options.split())
    planned, run = engine.plans
    assert planned.job == run.job
    for plan in (planned, run):
        assert (plan.fresh, plan.same_input) == (True, True)
        assert (plan.job.allow_import, plan.job.cluster.dashboard) == (True, False)
        assert (plan.job.run.workers, plan.job.run.retries, plan.job.tile.size) == (5, 0, 128)


@pytest.mark.parametrize("code", [0, 2, 5])
def test_a_plan_that_does_not_fit_or_would_be_refused_is_shown(config: Path, engine: Engine, code: int) -> None:
    said = ""
    if code == 5:
        engine.refuses, said = errors.DiskRefused("10 GiB needed, 1 GiB free"), "error: 10 GiB needed, 1 GiB free\n"
    elif code == 2:
        engine.stands, said = errors.ResumeRefused("of another job"), "error: of another job\n"
    result, as_json = ask("plan", config), ask("plan", config, "--json")
    assert (result.exit_code, as_json.exit_code) == (code, code)
    assert "4,096 × 4,096" in result.stdout, "what was refused is shown"
    assert result.stderr.endswith(said)
    assert json.loads(as_json.stdout) == FIGURES | {"resumed_blocks": 0}


@pytest.mark.parametrize("number", [signal.SIGTERM, thorough(signal.SIGUSR1)])
def test_a_signal_before_a_run_begins_stops_it_resumably(config: Path, number: signal.Signals) -> None:
    """While the plan is made, say."""
    script = (
        f"import os, sys\nfrom halotile.cli import running\nfrom halotile.cli.main import main\nsys.argv = ['recon-cli', 'run', {str(config)!r}]\n"
        f"running.make_plan = lambda job, **_: os.kill(os.getpid(), {int(number)})\nmain()\n"
    )
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stderr) == (75, f"stopped on {number.name}; run again to resume\n")
    assert not config.with_name("clean.zarr.run").exists()


WRONG_USAGE = [
    ("runn", ""),
    ("run", ""),
    ("run c.yaml --wrokers 2", ""),
    ("run c.yaml --workers two", "'two' is not a whole number; write one such as 4."),
    ("resume {folder}/config.yaml", "is a job file. To continue its run, write: recon-cli run "),
    ("verify {folder}/noisy.npy", "noisy.npy is not the output of a run"),
    ("verify {folder}/config.yaml", "config.yaml is not the output of a run"),
]


@pytest.mark.parametrize(("words", "said"), WRONG_USAGE)
def test_wrong_usage_exits_2(config: Path, words: str, said: str) -> None:
    result = refused(*words.format(folder=config.parent).split())
    assert said in result
    assert "Traceback" not in result


@pytest.mark.parametrize("path", ["nothing.zarr", "no/where.zarr", "noisy.npy/nothing.zarr", "dangling.zarr"])
@pytest.mark.parametrize("command", [["verify"], ["verify", "--repair"], ["status"], ["resume"]], ids=" ".join)
def test_a_path_where_nothing_stands_is_wrong_usage(config: Path, command: list[str], path: str) -> None:
    config.with_name("dangling.zarr").symlink_to("gone.zarr")
    assert ("nothing is there" if "verify" in command else "no run here") in refused(*command, config.parent / path)


@pytest.mark.parametrize(
    ("path", "words"),
    [("noisy.npy/x.zarr", "is a file, so nothing can be made in it"), ("no/deep/x.zarr", "mkdir -p ")],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_an_output_without_a_folder_is_refused(config: Path, command: str, path: str, words: str) -> None:
    before = sorted(config.parent.iterdir())
    assert words in refused(command, config, "--set", f"output.path={path}")
    assert sorted(config.parent.iterdir()) == before


HEAVY = {"torch", "dask", "distributed", "zarr", "tifffile", "deepinv"}
LIGHT = """
import atexit, sys
from halotile.cli.main import main
heavy, *words = sys.argv[1:]
sys.argv[1:] = words
atexit.register(lambda: print("loaded", sorted({*heavy.split()} & {*sys.modules})))
main()
"""


@pytest.mark.parametrize(
    "words", ["--help", "--version", "validate", "status", "schema", "plan", "validate reconstruct", "plan reconstruct"]
)
def test_a_light_command_loads_nothing_heavy(config: Path, reconstruction: Path, words: str) -> None:
    command, _, is_reconstruction = words.partition(" ")
    directory, job = config.with_name("clean.zarr.run"), reconstruction if is_reconstruction else config
    if command == "status":
        directory.mkdir()
        (directory / "status.json").write_text(json.dumps({"state": "finished", "done": 1, "total": 1}))
    paths = {"validate": [job], "status": [directory], "plan": [job]}
    heavy = {"torch", "deepinv"} if command == "plan" else HEAVY
    ended = run_python("-c", LIGHT, " ".join(heavy), command, *map(str, paths.get(command, [])))
    assert (ended.returncode, ended.stdout.endswith("loaded []\n")) == (0, True), ended.stdout + ended.stderr
    assert {"--version": f"halotile {__version__}\n", "plan": "declared by tv"}.get(words, "") in ended.stdout


def test_help_lists_every_command_once_in_its_group() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    grouped = [name for group in COMMANDS.values() for name in group]
    assert sorted(grouped) == sorted(name for name, one in commands.items() if not one.hidden)
    text = ask("--help").stdout
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Options", *COMMANDS]
    assert "  run     Run a job; an interrupted one resumes" in text


@pytest.mark.parametrize(
    ("command", "code"), [("info noisy.npy", 0), ("validate config.yaml --json --set tile.sise=1", 2)]
)
def test_a_reader_that_stops_early_changes_nothing_else(config: Path, command: str, code: int) -> None:
    line = f"{sys.executable} -m halotile {command} 2>/dev/null | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=config.parent, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_progress_that_nobody_reads_ends_no_run(config: Path) -> None:
    code = (
        "import os\nfrom halotile.cli.screens.progress_report import make_report\nfrom halotile.graphs.watching.progress import Progress\n"
        "moment = Progress(phase='x', done=0, resumed=0, total=1, pixels_done=0, pixels_total=1, seconds=0.0)\n"
        "with make_report(quiet=False) as report:\n    report(moment)\nos.write(1, b'went on')\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write, timeout=60)
    os.close(write)
    assert (done.returncode, done.stdout) == (0, b"went on")


CODES: list[tuple[type[BaseException], int]] = [
    *((kind, 2) for kind in (errors.ConfigError, errors.UnknownName, errors.OutputRefused, errors.OutputInUse, errors.ResumeRefused,
                             errors.MissingPackage, errors.WeightsError, errors.WrongKind)),
    *((kind, 4) for kind in (errors.InputError, errors.DamagedData, errors.InputUnreadable, errors.BlockInputFailed)),
    *((kind, 5) for kind in (errors.Refused, errors.MemoryRefused, errors.DiskRefused, MemoryError)),
    *((kind, 1) for kind in (errors.BlockFailed, errors.Diverged, errors.Stalled, errors.TaskFailed, errors.ClusterFailed, errors.WorkerDied,
                             errors.JobNotLoaded, errors.RankFailed, errors.PeerLost, errors.HalotileError, RuntimeError, OSError, ValueError)),
    (errors.Stopped, 75), (KeyboardInterrupt, 130),
]  # fmt: skip


def test_every_error_has_its_exit_code() -> None:
    assert [exit_code(kind("why")) for kind, _ in CODES] == [code for _, code in CODES]
    assert {kind for kind in vars(errors).values() if isinstance(kind, type)} <= {kind for kind, _ in CODES}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_refusal_whoever_writes(monkeypatch: MonkeyPatch, number: int) -> None:
    full = OSError(number, os.strerror(number))
    monkeypatch.setattr(info, "describe", Mock(side_effect=full))
    result = ask("info", "a.tif")
    assert result.exit_code == exits.REFUSED
    assert f"error: the disk ran full: nothing more can be written ({full}). Free some space" in result.output


def test_a_working_directory_that_was_removed_is_told(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in ("verify", "status", "levels"):
        result = ask(command, "a.zarr")
        assert (result.exit_code, "the working directory was removed" in result.output) == (2, True)


def test_settings_of_dask_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for settings, wrong in (
        ("distributed: [1", "ValueError: A dask config file at"), ("distributed: {logging: 3}", "TypeError: "),
    ):  # fmt: skip
        (tmp_path / "mine.yaml").write_text(settings)
        result = run_python("-m", "halotile", "doctor", environment={"DASK_CONFIG": str(tmp_path)})
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: Dask cannot read its settings ({wrong}")
        assert result.stderr.endswith("Correct them: ~/.config/dask, variables DASK_...\n")


@pytest.mark.parametrize("named_by", ["directory", "output"])
def test_resume_goes_on_from_the_run_directory(config: Path, engine: Engine, named_by: str) -> None:
    output = config.with_name("clean.zarr")
    directory = save_job(config, output)
    words = ["resume", str(directory if named_by == "directory" else output), "--workers", "3"]
    assert ask(*words).exit_code == 0
    (plan,) = engine.plans
    assert (plan.fresh, plan.job.run.workers, plan.job.denoiser.options) == (False, 3, {"strength": 0.2})


def test_a_run_directory_that_was_moved_alone_is_not_resumed(config: Path, engine: Engine) -> None:
    directory = save_job(config, config.with_name("clean.zarr"))
    for name in ("copy.run", "copy"):
        directory = directory.rename(directory.with_name(name))
        assert "it was moved or copied. Move both back" in refused("resume", directory)
    assert not engine.plans


@pytest.mark.parametrize("left", ["clean.zarr", "clean.zarr.run", None])
def test_a_run_that_may_be_a_copy_or_is_at_work_is_not_resumed(config: Path, engine: Engine, left: str | None) -> None:
    directory = save_job(config, config.with_name("clean.zarr")).rename(config.with_name("moved.zarr.run"))
    before = (directory / "job.json").read_text()
    for name in ("moved.zarr", *([left] if left else [])):
        config.with_name(name).mkdir()
    words = "it was moved or copied, and something still stands at the old place" if left else "in use"
    with nullcontext() if left else RunDirectory(directory).lock():
        assert words in refused("resume", directory)
    assert (directory / "job.json").read_text() == before
    assert not engine.plans


def moment(**changed: Any) -> Progress:
    usual: dict[str, Any] = {
        "phase": "denoise", "done": 150, "resumed": 100, "total": 400, "seconds": 10.0, "workers": 4,
        "pixels_done": 50_000_000, "pixels_total": 400_000_000, "read_bytes": 3 * 10**8, "written_bytes": 2 * 10**8,
        "peak_memory_bytes": 3 * 2**28,
    }  # fmt: skip
    return Progress(**usual | changed)


LINES = [
    ({}, "denoise  150 of 400 blocks (100 resumed)  38 %  5 Mpix/s  50 MB/s  50 s left  4 workers  768 MiB peak"),
    ({"done": 100, "seconds": 0.0, "peak_memory_bytes": 0}, "denoise  100 of 400 blocks (100 resumed)  25 %  4 workers"),
    ({"resumed": 0, "seconds": 0.0, "peak_memory_bytes": 0}, "denoise  150 of 400 blocks  38 %  4 workers"),
    ({"done": 0, "resumed": 0, "total": 1, "workers": 1, "peak_memory_bytes": 0}, "denoise  0 of 1 block  0 %  1 worker"),
    ({"retried": 2, "failed": 1}, "denoise  150 of 400 blocks (100 resumed, 2 retried, 1 failed)"),
    ({"phase": "stop", "done": 400}, "done  "),
    ({"phase": "stop", "done": 399}, "stop  "),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "text"), LINES)
def test_a_line_has_what_is_known(changed: dict[str, Any], text: str) -> None:
    assert line_of(moment(**changed)).startswith(text)


def test_lines_come_every_ten_seconds_at_each_change_of_phase_and_message_and_of_a_start_once() -> None:
    now, written = [0.0], list[str]()
    report = Lines(written.append, clock=lambda: now[0])
    with report:
        for now[0] in range(60):
            report(moment(phase="start", done=0, total=400))
        for now[0], done in [(61.0, 0), (62.0, 1), (69.0, 2), (72.0, 3)]:
            report(moment(phase="denoise" if done else "start", done=done))
        report(moment(message="dashboard: http://127.0.0.1:1/status"))
    assert [text.split()[0:2] for text in written[:-1]] == [["start", "0"], ["denoise", "1"], ["denoise", "3"]]
    assert LINE_SECONDS == 10.0
    assert written[-1] == "dashboard: http://127.0.0.1:1/status"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_picture_is_two_lines_at_any_width(width: int) -> None:
    for done in (0, 100, 150, 399, 400):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, record=True)
        console.print(image(moment(done=done, resumed=min(done, 100), retried=1), width))
        text = console.export_text()
        assert len(text.splitlines()) == 2
        assert max(map(len, text.splitlines())) <= width
        if (width, done) == (80, 150):
            assert "150 of 400 blocks (100 resumed, 1 retried)" in text
            assert "38 % · 5 Mpix/s · 50 MB/s · 50 s left · 4 workers · 768 MiB peak" in text


def test_the_terminal_is_left_as_it_was_when_a_run_fails() -> None:
    console = Console(file=(written := io.StringIO()), width=80, force_terminal=True)

    def fail() -> None:
        with Live(console) as report:
            report(moment(message="[bold]a path[/bold]"))
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    assert written.getvalue().rstrip().endswith("\x1b[2K")
    assert "\x1b[?25h" in written.getvalue()
    assert "[bold]a path[/bold]" in written.getvalue()
