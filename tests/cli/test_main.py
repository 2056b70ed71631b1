"""Each command answers with the right words in the right place, and the right exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from halotile import errors
from halotile.cli.app import COMMANDS
from halotile.cli.main import app
from halotile.graphs.kinds.base import Inspection
from tests.cases import thorough
from tests.cli.engine import BAD, ENDING, FIGURES, RUNNER, Engine, MonkeyPatch, ask, printed, refused, without_loading


def test_run_hands_the_whole_command_line_to_the_engine(config: Path, engine: Engine) -> None:
    words = [
        "--workers",
        "5",
        "--set",
        "tile.size=128",
        "--set",
        "run.retries=0",
        "--fresh",
        "--same-input",
        "--allow-import",
    ]
    printed("run", config, *words, "--no-dashboard")
    (plan,) = engine.plans
    assert (plan.fresh, plan.same_input) == (True, True)
    assert (plan.job.allow_import, plan.job.cluster.dashboard) == (True, False)
    assert (plan.job.run.workers, plan.job.run.retries, plan.job.tile.size) == (5, 0, 128)


def test_results_go_to_stdout_and_progress_to_stderr(config: Path, engine: Engine) -> None:
    result = ask("run", config)
    assert "400 of 400 done, 100 of them by an earlier run" in result.stdout
    assert "54.4 Mpix/s over 1 min 30 s" in result.stdout
    assert "512 MiB in one worker" in result.stdout
    assert re.search(r"time +\S+ s in total, \S+ s of it planning and 5.0 s starting", result.stdout)
    assert "400 blocks, depth 8 (declared by tv), 2 workers" in result.stderr
    assert "start  100 of 400 blocks (100 resumed)" in result.stderr
    assert "blocks" not in result.stdout.replace("blocks  ", "")


def test_json_is_the_only_thing_on_stdout(config: Path, engine: Engine) -> None:
    result = ask("run", config, "--json")
    found = json.loads(result.stdout)
    assert (found["megapixels_per_second"], found["start_seconds"]) == (54.4, 5.0)
    assert found["total_seconds"] > found["plan_seconds"] > 0


def test_quiet_is_silent(config: Path, engine: Engine) -> None:
    result = ask("run", config, "--quiet")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 0)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_warning_is_shown_to_the_quiet_too(config: Path, engine: Engine, options: list[str]) -> None:
    found = Inspection({"residual": []}, [], ["the result is darker than the image"])
    engine.ends = replace(ENDING, inspection=found)
    result = ask("run", config, "--quiet", *options)
    assert (result.stderr, result.exit_code) == ("warning: the result is darker than the image\n", 0)
    assert "warning" not in result.stdout


def test_quarantined_blocks_are_named_and_exit_3(config: Path, engine: Engine) -> None:
    engine.ends = replace(ENDING, quarantined=(BAD,))
    result = ask("run", config, "--json")
    assert result.exit_code == 3
    assert "quarantined: block 7 (index (1, 2), region (0, 512)–(512, 1024)): not finite" in result.stderr
    assert json.loads(result.stdout)["quarantined"][0]["region"] == [[0, 512], [512, 1024]]


def test_of_a_long_error_the_first_line_is_shown_and_programs_have_all(config: Path, engine: Engine) -> None:
    bad = replace(BAD, error="ValueError: poisoned\nby hand")
    engine.ends = replace(ENDING, quarantined=(bad,))
    result = ask("run", config, "--json")
    assert result.stderr.endswith("region (0, 512)–(512, 1024)): ValueError: poisoned\n")
    assert json.loads(result.stdout)["quarantined"][0]["error"] == bad.error


def test_one_block_is_a_block(config: Path, engine: Engine, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, "blocks", 1)
    monkeypatch.setitem(FIGURES, "workers", 1)
    result = ask("run", config)
    assert "uint16 in 1 block, depth 8 (declared by tv), 1 worker\n" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.BlockFailed("1 of 400 blocks failed"), 1, "error: 1 of 400 blocks failed\n"),
        (errors.OutputRefused("in use"), 2, "error: in use\n"),
        (errors.DamagedData("cut short"), 4, "error: cut short\n"),
        (errors.MemoryRefused("too big"), 5, "error: too big\n"),
        (errors.Stopped("stopped on SIGTERM"), 75, "\nstopped on SIGTERM\n"),
        (KeyboardInterrupt(), 130, "\nstopped; run again to resume\n"),
        (KeyError("x"), 1, "error: unexpected KeyError: 'x'\nrun again with --debug for the traceback\n"),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_a_failing_run_ends_in_one_message(
    config: Path, engine: Engine, error: BaseException, code: int, message: str, debug: bool
) -> None:
    engine.ends = error
    result = refused("run", config, *(["--debug"] if debug else []), code=code)
    assert result.endswith(message)
    assert ("Traceback" in result) == debug


def test_a_run_that_is_refused_for_its_output_says_nothing_else(config: Path, engine: Engine) -> None:
    engine.stands = errors.OutputRefused("output.path is clean.zarr: something stands there.")
    result = ask("run", config)
    said = "error: output.path is clean.zarr: something stands there.\n"
    assert (result.exit_code, result.stderr) == (2, said)


def test_a_plan_that_is_stopped_leaves_nothing_to_resume(config: Path, monkeypatch: MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("halotile.cli.running.make_plan", stopped)
    result = ask("plan", config)
    assert (result.exit_code, result.stderr.strip()) == (130, "stopped")


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


CARD = {
    "device": "cuda",
    "device_memory_bytes": TRIED["device_bytes"],
    "tuned": TRIED,
    "tile": [1024, 1024],
    "batch": 4,
}
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
    words = [str(config), "--workers", "3", "--set", "tile.size=128", "--allow-import", "--no-dashboard"]
    for command in ("plan", "run"):
        assert ask(command, *words).exit_code == 0
    planned, run = engine.plans
    assert planned.job == run.job
    assert not planned.job.cluster.dashboard


def test_plan_gives_its_figures_to_programs(config: Path, engine: Engine) -> None:
    assert json.loads(ask("plan", config, "--json").stdout) == FIGURES | {"resumed_blocks": 0}


def test_a_plan_that_does_not_fit_exits_5(config: Path, engine: Engine) -> None:
    engine.refuses = errors.DiskRefused("10 GiB needed, 1 GiB free")
    result = ask("plan", config)
    assert result.exit_code == 5
    assert "4,096 × 4,096" in result.stdout, "what was refused is shown"
    assert result.stderr == "error: 10 GiB needed, 1 GiB free\n"
    as_json = ask("plan", config, "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)) == (5, FIGURES | {"resumed_blocks": 0})
    assert as_json.stderr == result.stderr


def test_a_plan_whose_run_would_be_refused_is_shown_and_refused(config: Path, engine: Engine) -> None:
    engine.stands = errors.ResumeRefused("clean.zarr.run belongs to a different job")
    result = ask("plan", config)
    assert result.exit_code == 2
    assert "4,096 × 4,096" in result.stdout
    assert result.stderr == "error: clean.zarr.run belongs to a different job\n"


def test_plan_begins_anew_where_run_does(config: Path, engine: Engine) -> None:
    assert ask("plan", config, "--fresh", "--same-input").exit_code == 0
    assert (engine.plans[0].fresh, engine.plans[0].same_input) == (True, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, thorough(signal.SIGUSR1)])
def test_a_signal_before_a_run_begins_stops_it_resumably(config: Path, number: signal.Signals) -> None:
    """While the plan is made, say."""
    script = (
        "import os, sys\n"
        "from halotile.cli import running\n"
        "from halotile.cli.main import main\n"
        f"running.make_plan = lambda job, **_: os.kill(os.getpid(), {int(number)})\n"
        f"sys.argv = ['recon-cli', 'run', {str(config)!r}]\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (75, f"stopped on {number.name}; run again to resume\n")
    assert not config.with_name("clean.zarr.run").exists()


@pytest.mark.parametrize(
    "words", [["runn"], ["run"], ["run", "c.yaml", "--wrokers", "2"], ["run", "c.yaml", "--workers", "x"]]
)
def test_wrong_usage_exits_2(words: list[str]) -> None:
    assert "Traceback" not in refused(*words)


def test_a_number_that_is_none_is_refused_in_plain_words() -> None:
    result = ask("run", "c.yaml", "--workers", "two")
    assert "'two' is not a whole number; write one such as 4." in result.stderr


@pytest.mark.parametrize("path", ["nothing.zarr", "no/where.zarr", "noisy.npy/nothing.zarr", "dangling.zarr"])
@pytest.mark.parametrize("command", [["verify"], ["verify", "--repair"], ["status"], ["resume"]], ids=" ".join)
def test_a_path_where_nothing_stands_is_wrong_usage(config: Path, command: list[str], path: str) -> None:
    config.with_name("dangling.zarr").symlink_to("gone.zarr")
    assert ("nothing is there" if "verify" in command else "no run here") in refused(*command, config.parent / path)


@pytest.mark.parametrize("name", ["noisy.npy", "config.yaml"])
def test_a_file_that_is_no_output_is_not_verified(config: Path, name: str) -> None:
    assert f"{name} is no output that a run wrote" in refused("verify", config.with_name(name))


def test_a_job_file_is_resumed_by_run(config: Path) -> None:
    assert f"is a job file. To continue its run, write: recon-cli run {config}." in refused("resume", config)


@pytest.mark.parametrize(
    ("path", "words"),
    [("noisy.npy/x.zarr", "is a file, so nothing can be made in it"), ("no/deep/x.zarr", "mkdir -p ")],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_an_output_without_a_folder_is_refused(config: Path, command: str, path: str, words: str) -> None:
    before = sorted(config.parent.iterdir())
    assert words in refused(command, config, "--set", f"output.path={path}")
    assert sorted(config.parent.iterdir()) == before


def test_the_version_is_told() -> None:
    from halotile import __version__

    assert ask("--version").stdout == f"halotile {__version__}\n"


HEAVY = {"torch", "dask", "distributed", "zarr", "tifffile", "deepinv"}


@pytest.mark.parametrize("command", ["--help", "--version", "validate", "status", "schema"])
def test_a_light_command_loads_nothing_heavy(config: Path, command: str) -> None:
    directory = config.with_name("clean.zarr.run")
    directory.mkdir()
    (directory / "status.json").write_text(json.dumps({"state": "finished", "done": 1, "total": 1}))
    paths = {"validate": [config], "status": [directory]}
    without_loading(HEAVY, command, *paths.get(command, []))


def test_help_lists_every_command_once_in_its_group() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    grouped = [name for group in COMMANDS.values() for name in group]
    assert sorted(grouped) == sorted(name for name, one in commands.items() if not one.hidden)
    text = ask("--help").stdout
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Options", *COMMANDS]
    assert "  run     Run a job; an interrupted one resumes" in text


def test_plan_does_not_load_torch_for_a_built_in_denoiser(config: Path) -> None:
    assert "declared by tv" in without_loading({"torch", "deepinv"}, "plan", config)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("schema", 0),
        ("info {folder}/noisy.npy", 0),
        ("info {folder}/noisy.npy --json", 0),
        ("validate {folder}/config.yaml --json --set tile.sise=1", 2),
    ],
)
def test_a_reader_that_stops_early_changes_nothing_else(config: Path, command: str, code: int) -> None:
    words = command.format(folder=config.parent)
    line = f"{sys.executable} -m halotile {words} 2>/dev/null | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
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


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "halotile", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("halotile ")


@pytest.mark.parametrize("colours", [{"NO_COLOR": "1"}, {}])
def test_what_goes_into_a_pipe_is_plain_text(config: Path, engine: Engine, colours: dict[str, str]) -> None:
    assert "\x1b" not in RUNNER.invoke(app, ["plan", str(config)], env=colours).output
