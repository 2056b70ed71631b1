"""Each command answers with the right words in the right place, and the right exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from halotile import errors
from halotile.cli.main import app
from halotile.graphs.job import Job
from halotile.graphs.progress import Progress
from halotile.graphs.verify import Verdict
from halotile.storage.grid import Region
from halotile.storage.rundir import RunDirectory
from halotile.storage.runs import Runs

RUNNER = CliRunner()

FIGURES = {
    "input": "noisy.zarr", "output": "clean.zarr", "shape": [70000, 70000], "axes": "yx", "dtype": "uint16",
    "output_shape": [70000, 70000], "output_dtype": "uint16", "denoiser": "tv", "blocks": 400, "block": [4096, 4096],
    "shard": [1024, 1024], "chunk": [256, 256], "tile": [512, 512], "batch": 1, "depth": [[8, 8], [8, 8]],
    "depth_from": "declared by tv", "boundary": "reflect", "read_amplification": 1.0078, "compute_redundancy": 1.0635,
    "peak_memory_per_worker_bytes": 3 * 2**28, "memory_per_worker_bytes": 2**32, "output_bytes": 9_800_000_000,
    "scratch_bytes": 0, "free_disk_bytes": 10**11, "workers": 2, "fingerprint": "ab", "notes": ["a note"],
}  # fmt: skip


@dataclass(frozen=True)
class Bad:
    number: int = 7
    index: tuple[int, ...] = (1, 2)
    region: Region = field(default_factory=lambda: Region((0, 512), (512, 1024)))
    error: str = "not finite"


@dataclass(frozen=True)
class Ending:
    done: int = 400
    total: int = 400
    resumed: int = 100
    quarantined: tuple[Bad, ...] = ()
    seconds: float = 90.0
    megapixels_per_second: float = 54.4
    peak_memory_bytes: int = 2**29
    output: str = "/data/clean.zarr"
    run_directory: str = "/data/clean.zarr.run"
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FakePlan:
    job: Job
    fresh: bool
    refuses: BaseException | None = None
    same_input: bool = False

    def summary(self) -> dict[str, Any]:
        return FIGURES

    def check_fits(self) -> None:
        if self.refuses is not None:
            raise self.refuses


@dataclass
class Engine:
    """Stands in for halotile.graphs, which would load Dask: remembers what was asked, ends as told."""

    ends: Ending | BaseException = field(default_factory=Ending)
    refuses: BaseException | None = None
    plans: list[FakePlan] = field(default_factory=list)
    stands: int | BaseException = 0
    """Blocks that an earlier run has done, or why a run would be refused."""

    def make_plan(
        self, job: Job, *, fresh: bool = False, refuse: bool = True, same_input: bool = False
    ) -> FakePlan:
        self.plans.append(FakePlan(job, fresh, self.refuses, same_input))
        if refuse:
            self.plans[-1].check_fits()
        return self.plans[-1]

    def look(self, plan: FakePlan) -> int:
        if isinstance(self.stands, BaseException):
            raise self.stands
        return self.stands

    def run(self, plan: FakePlan, *, observer: Callable[[Progress], None]) -> Ending:
        observer(
            Progress(
                phase="start", done=100, resumed=100, total=400, pixels_done=0, pixels_total=1, seconds=0.0
            )
        )
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    for name, function in {"planner": "make_plan", "tiles": "run", "claim": "look"}.items():
        module = ModuleType(name)
        setattr(module, function, getattr(made, function))
        monkeypatch.setitem(sys.modules, f"halotile.graphs.{name}", module)
    return made


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
    result = RUNNER.invoke(app, ["run", str(config), *words, "--no-dashboard"])
    assert result.exit_code == 0
    (plan,) = engine.plans
    assert (plan.fresh, plan.same_input) == (True, True)
    assert (plan.job.allow_import, plan.job.cluster.dashboard) == (True, False)
    assert (plan.job.run.workers, plan.job.run.retries, plan.job.tile.size) == (5, 0, 128)


def test_results_go_to_stdout_and_progress_to_stderr(config: Path, engine: Engine) -> None:
    result = RUNNER.invoke(app, ["run", str(config)])
    assert "400 of 400 done, 100 of them by an earlier run" in result.stdout
    assert "54.4 Mpix/s over 1 min 30 s" in result.stdout
    assert "512 MiB in one worker" in result.stdout
    assert "400 blocks, depth 8 (declared by tv), 2 workers" in result.stderr
    assert "start  100 of 400 blocks (100 resumed)" in result.stderr
    assert "blocks" not in result.stdout.replace("blocks  ", "")


def test_json_is_the_only_thing_on_stdout(config: Path, engine: Engine) -> None:
    result = RUNNER.invoke(app, ["run", str(config), "--json"])
    assert json.loads(result.stdout)["megapixels_per_second"] == 54.4


def test_quiet_is_silent(config: Path, engine: Engine) -> None:
    result = RUNNER.invoke(app, ["run", str(config), "--quiet"])
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 0)


def test_quarantined_blocks_are_named_and_exit_3(config: Path, engine: Engine) -> None:
    engine.ends = replace(Ending(), quarantined=(Bad(),))
    result = RUNNER.invoke(app, ["run", str(config), "--json"])
    assert result.exit_code == 3
    assert "quarantined: block 7 (index (1, 2), region (0, 512)–(512, 1024)): not finite" in result.stderr
    assert json.loads(result.stdout)["quarantined"][0]["region"] == [[0, 512], [512, 1024]]


def test_of_a_long_error_the_first_line_is_shown_and_programs_have_all(config: Path, engine: Engine) -> None:
    bad = replace(Bad(), error="ValueError: poisoned\nby hand")
    engine.ends = replace(Ending(), quarantined=(bad,))
    result = RUNNER.invoke(app, ["run", str(config), "--json"])
    assert result.stderr.endswith("region (0, 512)–(512, 1024)): ValueError: poisoned\n")
    assert json.loads(result.stdout)["quarantined"][0]["error"] == bad.error


def test_one_block_is_a_block(config: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, "blocks", 1)
    monkeypatch.setitem(FIGURES, "workers", 1)
    result = RUNNER.invoke(app, ["run", str(config)])
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
    result = RUNNER.invoke(app, ["run", str(config), *(["--debug"] if debug else [])])
    assert result.exit_code == code
    assert result.stderr.endswith(message)
    assert ("Traceback" in result.stderr) == debug


def test_plan_prints_its_figures(config: Path, engine: Engine) -> None:
    text = RUNNER.invoke(app, ["plan", str(config)]).stdout
    shown = [" ".join(line.split()) for line in text.splitlines()]
    assert "blocks 400 of 4,096 × 4,096" in shown
    assert "depth 8 pixels, declared by tv" in shown
    assert "read 1.01 × the picture" in shown
    assert "memory 768 MiB at the peak in each worker, of 4 GiB allowed" in shown
    assert "disk up to 9.1 GiB of output, no scratch; 93.1 GiB free" in shown
    assert "note a note" in shown


def test_the_words_of_a_run_do_for_its_plan(config: Path, engine: Engine) -> None:
    words = [str(config), "--workers", "3", "--set", "tile.size=128", "--allow-import", "--no-dashboard"]
    for command in ("plan", "run"):
        assert RUNNER.invoke(app, [command, *words]).exit_code == 0
    planned, run = engine.plans
    assert planned.job == run.job
    assert not planned.job.cluster.dashboard


def test_plan_gives_its_figures_to_programs(config: Path, engine: Engine) -> None:
    assert json.loads(RUNNER.invoke(app, ["plan", str(config), "--json"]).stdout) == FIGURES | {
        "resumed_blocks": 0
    }


def test_a_plan_that_does_not_fit_exits_5(config: Path, engine: Engine) -> None:
    engine.refuses = errors.DiskRefused("10 GiB needed, 1 GiB free")
    result = RUNNER.invoke(app, ["plan", str(config)])
    assert result.exit_code == 5
    assert "4,096 × 4,096" in result.stdout, "what was refused is shown"
    assert result.stderr == "error: 10 GiB needed, 1 GiB free\n"
    as_json = RUNNER.invoke(app, ["plan", str(config), "--json"])
    assert (as_json.exit_code, json.loads(as_json.stdout)) == (5, FIGURES | {"resumed_blocks": 0})
    assert as_json.stderr == result.stderr


def test_plan_says_what_an_earlier_run_has_done(config: Path, engine: Engine) -> None:
    engine.stands = 120
    text = RUNNER.invoke(app, ["plan", str(config)]).stdout
    assert "400 of 4,096 × 4,096; 120 are done already" in text


def test_a_plan_whose_run_would_be_refused_is_shown_and_refused(config: Path, engine: Engine) -> None:
    engine.stands = errors.ResumeRefused("clean.zarr.run belongs to a different job")
    result = RUNNER.invoke(app, ["plan", str(config)])
    assert result.exit_code == 2
    assert "4,096 × 4,096" in result.stdout
    assert result.stderr == "error: clean.zarr.run belongs to a different job\n"


def test_plan_begins_anew_where_run_does(config: Path, engine: Engine) -> None:
    assert RUNNER.invoke(app, ["plan", str(config), "--fresh", "--same-input"]).exit_code == 0
    assert (engine.plans[0].fresh, engine.plans[0].same_input) == (True, True)


def test_scratch_is_told_where_there_is_some(
    config: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FIGURES, "scratch_bytes", 2**20)
    text = RUNNER.invoke(app, ["plan", str(config)]).stdout
    assert "up to 9.1 GiB of output and 1 MiB of scratch; 93.1 GiB free" in text


def save_job(config: Path, output: Path) -> Path:
    directory = output.with_name(output.name + ".run")
    directory.mkdir()
    sections = {"input": {"path": str(config.with_name("noisy.npy"))}, "output": {"path": str(output)}}
    job = {"version": 1, "job": "denoise"} | sections | {"denoiser": {"name": "tv", "strength": 0.2}}
    (directory / "job.json").write_text(json.dumps(job))
    return directory


@pytest.mark.parametrize("named_by", ["directory", "output"])
def test_resume_goes_on_from_the_run_directory(config: Path, engine: Engine, named_by: str) -> None:
    output = config.with_name("clean.zarr")
    directory = save_job(config, output)
    words = ["resume", str(directory if named_by == "directory" else output), "--workers", "3"]
    assert RUNNER.invoke(app, words).exit_code == 0
    (plan,) = engine.plans
    assert (plan.fresh, plan.job.run.workers, plan.job.denoiser.options) == (False, 3, {"strength": 0.2})


def test_a_run_directory_that_was_moved_alone_is_not_resumed(config: Path, engine: Engine) -> None:
    directory = save_job(config, config.with_name("clean.zarr"))
    for name in ("copy.run", "copy"):
        directory = directory.rename(directory.with_name(name))
        result = RUNNER.invoke(app, ["resume", str(directory)])
        assert result.exit_code == 2
        assert "it was moved or copied. Move both back" in result.stderr
    assert not engine.plans


@pytest.mark.parametrize("relative", [False, True])
def test_a_run_that_was_moved_with_its_output_goes_on_there(
    config: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    directory = save_job(config, config.with_name("clean.zarr")).rename(config.with_name("moved.zarr.run"))
    moved = config.with_name("moved.zarr")
    moved.mkdir()
    monkeypatch.chdir(config.parent)
    for _ in range(2):
        assert RUNNER.invoke(app, ["resume", directory.name if relative else str(directory)]).exit_code == 0
    assert [plan.job.output.path for plan in engine.plans] == [str(moved)] * 2
    saved = json.loads((directory / "job.json").read_text())
    assert (saved["output"]["path"], saved["denoiser"]["strength"]) == (str(moved), 0.2)


@pytest.mark.parametrize("left", ["clean.zarr", "clean.zarr.run"])
def test_a_run_that_may_be_a_copy_is_not_resumed(config: Path, engine: Engine, left: str) -> None:
    directory = save_job(config, config.with_name("clean.zarr")).rename(config.with_name("moved.zarr.run"))
    before = (directory / "job.json").read_text()
    for name in ("moved.zarr", left):
        config.with_name(name).mkdir()
    result = RUNNER.invoke(app, ["resume", str(directory)])
    assert result.exit_code == 2
    assert "it was moved or copied, and something still stands at the old place" in result.stderr
    assert (directory / "job.json").read_text() == before
    assert not engine.plans


def test_a_run_that_was_moved_while_it_works_is_left_alone(config: Path, engine: Engine) -> None:
    directory = save_job(config, config.with_name("clean.zarr")).rename(config.with_name("moved.zarr.run"))
    config.with_name("moved.zarr").mkdir()
    before = (directory / "job.json").read_text()
    with RunDirectory(directory).lock():
        result = RUNNER.invoke(app, ["resume", str(directory)])
    assert (result.exit_code, "in use" in result.stderr) == (2, True)
    assert (directory / "job.json").read_text() == before


def find(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    """Have every check find this."""
    module = ModuleType("verify")
    module.verify = lambda output, **_: verdict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "halotile.graphs.verify", module)


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        (Verdict(4, 4, (), 0), 0, "sound, 4 of 4 blocks checked"),
        (Verdict(1, 1, (), 0), 0, "sound, 1 of 1 block checked"),
        (Verdict(4, 4, ("block 2: checksum",), 0), 4, "block 2: checksum"),
        (Verdict(4, 4, ("block 2: checksum",), 1), 0, "1 problem repaired"),
        (Verdict(4, 3, (), 0, Runs([2])), 3, "1 block is not done: 2 (quarantined, or not yet run)"),
        (Verdict(9, 4, (), 0, Runs(range(4, 9))), 3, "5 blocks are not done: 4-8 (quar"),
        (Verdict(4, 3, ("block 0: cut",), 0, Runs([2])), 4, "1 block is not done: 2"),
    ],
)
def test_verify_tells_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, code: int, words: str
) -> None:
    find(monkeypatch, verdict)
    result = RUNNER.invoke(app, ["verify", str(tmp_path / "clean.zarr")])
    assert result.exit_code == code
    assert words in result.stdout
    assert ("recon-cli resume" in result.stderr) == (code == 3)
    as_json = RUNNER.invoke(app, ["verify", str(tmp_path / "clean.zarr"), "--json"])
    assert json.loads(as_json.stdout)["ok"] == (code == 0)


@pytest.mark.parametrize(
    ("problems", "words"),
    [
        (("block 2: cut",), "--repair` does the damaged blocks again."),
        (("metadata: zarr.json is missing",), "--repair` restores the metadata."),
        (
            ("metadata: zarr.json is missing", "block 2: cut"),
            "--repair` restores the metadata and does the damaged blocks again.",
        ),
    ],
)
def test_verify_says_what_a_repair_would_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    problems: tuple[str, ...],
    words: str,
) -> None:
    find(monkeypatch, Verdict(4, 4, problems, 0))
    result = RUNNER.invoke(app, ["verify", str(tmp_path / "clean.zarr")])
    assert result.exit_code == 4
    assert result.stderr.endswith(
        f"clean.zarr is damaged. `recon-cli verify {tmp_path / 'clean.zarr'} {words}\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_a_run_begins_stops_it_resumably(config: Path, number: signal.Signals) -> None:
    """While the plan is made, say."""
    script = (
        "import os, sys, types\n"
        "from halotile.cli.main import main\n"
        "planner = types.ModuleType('planner')\n"
        f"planner.make_plan = lambda job, **_: os.kill(os.getpid(), {int(number)})\n"
        "sys.modules['halotile.graphs.planner'] = planner\n"
        f"sys.argv = ['recon-cli', 'run', {str(config)!r}]\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (75, f"stopped on {number.name}; run again to go on\n")
    assert not config.with_name("clean.zarr.run").exists()


def test_advice_allows_imports_where_the_job_needs_them(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = config.with_name("clean.zarr")
    directory = save_job(config, output)
    for allowed in (False, True):
        job = json.loads((directory / "job.json").read_text())
        (directory / "job.json").write_text(json.dumps(job | {"allow_import": allowed}))
        find(monkeypatch, Verdict(4, 4, ("block 2: cut",), 0))
        said = RUNNER.invoke(app, ["verify", str(directory)]).stderr
        assert (f"recon-cli verify {output} --repair --allow-import`" in said) == allowed


def test_verify_promises_no_repair_where_nothing_says_what_wrote_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(monkeypatch, Verdict(4, 4, ("shard 2: cut",), 0, repairable=False))
    result = RUNNER.invoke(app, ["verify", str(tmp_path / "clean.zarr")])
    assert result.exit_code == 4
    assert "no run directory" in result.stderr
    assert "--repair" not in result.stderr


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_verify_of_a_run_at_work_says_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    output = tmp_path / "clean.zarr"
    directory = RunDirectory(tmp_path / "clean.zarr.run")
    directory.create()
    directory.write_job({})
    directory.write_status({"state": "running", "host": host, "updated": time.time()})
    with directory.lock() if host != "elsewhere" else nullcontext():
        find(monkeypatch, Verdict(4, 3, (), 0, Runs([2])))
        result = RUNNER.invoke(app, ["verify", str(output)])
        assert result.exit_code == 3
        assert "is not complete: a run is still writing it. Wait until that is over" in result.stderr
        assert "resume" not in result.stderr
        find(monkeypatch, Verdict(4, 3, ("block 0: cut",), 0, Runs([2])))
        result = RUNNER.invoke(app, ["verify", str(output)])
        assert result.exit_code == 4
        assert "is damaged. A run is still writing it: when that is over, `recon-cli verify" in result.stderr
    directory.write_status({"state": "stopped"})
    find(monkeypatch, Verdict(4, 3, (), 0, Runs([2])))
    result = RUNNER.invoke(app, ["verify", str(output)])
    assert (result.exit_code, "recon-cli resume" in result.stderr) == (3, True)


@pytest.mark.parametrize(
    "words", [["runn"], ["run"], ["run", "c.yaml", "--wrokers", "2"], ["run", "c.yaml", "--workers", "x"]]
)
def test_wrong_usage_exits_2(words: list[str]) -> None:
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_a_number_that_is_none_is_refused_in_plain_words() -> None:
    result = RUNNER.invoke(app, ["run", "c.yaml", "--workers", "two"])
    assert "'two' is not a whole number; write one such as 4." in result.stderr


@pytest.mark.parametrize("path", ["nothing.zarr", "no/where.zarr", "noisy.npy/nothing.zarr", "dangling.zarr"])
@pytest.mark.parametrize(
    "command", [["verify"], ["verify", "--repair"], ["status"], ["resume"]], ids=" ".join
)
def test_a_path_where_nothing_stands_is_wrong_usage(config: Path, command: list[str], path: str) -> None:
    config.with_name("dangling.zarr").symlink_to("gone.zarr")
    result = RUNNER.invoke(app, [*command, str(config.parent / path)])
    assert result.exit_code == 2
    assert ("nothing is there" if "verify" in command else "no run here") in result.stderr


@pytest.mark.parametrize("name", ["noisy.npy", "config.yaml"])
def test_a_file_that_is_no_output_is_not_verified(config: Path, name: str) -> None:
    result = RUNNER.invoke(app, ["verify", str(config.with_name(name))])
    assert result.exit_code == 2
    assert f"{name} is no Zarr that a run wrote" in result.stderr


@pytest.mark.parametrize(
    ("path", "words"),
    [("noisy.npy/x.zarr", "is a file, so nothing can be made in it"), ("no/deep/x.zarr", "mkdir -p ")],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_an_output_whose_folder_is_none_is_refused_and_nothing_touched(
    config: Path, command: str, path: str, words: str
) -> None:
    before = sorted(config.parent.iterdir())
    result = RUNNER.invoke(app, [command, str(config), "--set", f"output.path={path}"])
    assert result.exit_code == 2
    assert words in result.stderr
    assert sorted(config.parent.iterdir()) == before


def test_the_version_is_told() -> None:
    from halotile import __version__

    assert RUNNER.invoke(app, ["--version"]).stdout == f"halotile {__version__}\n"


LIGHT = """
import sys
from halotile.cli.main import main
sys.argv = ["recon-cli", *{words!r}]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
loaded = {heavy!r} & set(sys.modules)
assert not loaded, loaded
"""
HEAVY = {"torch", "dask", "distributed", "zarr", "tifffile", "deepinv"}


@pytest.mark.parametrize("command", ["--help", "--version", "validate", "status", "schema"])
def test_a_light_command_loads_nothing_heavy(config: Path, command: str) -> None:
    directory = config.with_name("clean.zarr.run")
    directory.mkdir()
    (directory / "status.json").write_text(json.dumps({"state": "finished", "done": 1, "total": 1}))
    paths = {"validate": [str(config)], "status": [str(directory)]}
    code = LIGHT.format(words=[command, *paths.get(command, [])], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_plan_does_not_load_torch_for_a_built_in_denoiser(config: Path) -> None:
    code = LIGHT.format(words=["plan", str(config)], heavy={"torch", "deepinv"})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "declared by tv" in done.stdout


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("schema", 0),
        ("info {folder}/noisy.npy", 0),
        ("info {folder}/noisy.npy --json", 0),
        ("validate {folder}/config.yaml --json --set tile.sise=1", 2),
    ],
)
def test_a_reader_that_stops_early_changes_nothing_but_what_is_read(
    config: Path, command: str, code: int
) -> None:
    words = command.format(folder=config.parent)
    line = f"{sys.executable} -m halotile {words} 2>/dev/null | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_progress_that_nobody_reads_ends_no_run(config: Path) -> None:
    code = (
        "import os\nfrom halotile.cli.report import make_report\nfrom halotile.graphs.progress import Progress\n"
        "moment = Progress(phase='x', done=0, resumed=0, total=1, pixels_done=0, pixels_total=1, seconds=0.0)\n"
        "with make_report(quiet=False) as report:\n    report(moment)\nos.write(1, b'went on')\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write, timeout=60)
    os.close(write)
    assert (done.returncode, done.stdout) == (0, b"went on")


def test_the_package_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "halotile", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("halotile ")


@pytest.mark.parametrize("colours", [{"NO_COLOR": "1"}, {}])
def test_what_goes_into_a_pipe_is_plain_text(config: Path, engine: Engine, colours: dict[str, str]) -> None:
    assert "\x1b" not in RUNNER.invoke(app, ["plan", str(config)], env=colours).output
