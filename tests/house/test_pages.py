"""The pages: what they list is all that there is, keys and defaults of a job file too, and every name of programs that users come from."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
from fnmatch import fnmatch
from importlib import metadata
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import halotile
from halotile import registry
from halotile.cli import exits
from halotile.cli.app import COMMANDS
from halotile.cli.config.schema import config_schema
from halotile.cli.config.sections import keys_of_job
from halotile.cli.config.yaml_source import read_text
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.jobs.samples.job import MeasuredOperator
from halotile.graphs.kinds.base import kind_names
from halotile.graphs.kinds.sections import NamedChoice
from halotile.graphs.rules.keys import Keys, keys_of, written_keys
from tests.house.test_docs import LONGEST, PAGES, ROOT, fences, project


def test_the_readme_opens_with_the_two_commands() -> None:
    first = next(match for page, match in fences() if page == "README.md")
    assert first["body"].split("\n")[:2] == ["$ make demo", "$ make test"]


def test_pages_are_short_and_every_fence_says_what_it_is_and_every_link_to_a_file_leads_somewhere() -> None:
    assert {match["kind"] for _, match in fences()} <= {"console", "yaml", "python", "text"}
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert text.count("```") == 2 * len([1 for p, _ in fences() if p == page]), f"{page}: an unclosed fence"
        assert len(text.splitlines()) <= LONGEST.get(page, 260), page
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), (page, link)


def test_the_docs_list_every_exit_code_denoiser_extra_design_note_and_public_name() -> None:
    def found(pattern: str, text: str) -> list[str]:
        return re.findall(pattern, text, re.MULTILINE)

    names = ("commands", "denoisers", "install", "design", "api")
    commands, denoisers, install, design, api = ((ROOT / f"docs/{name}.md").read_text() for name in names)
    assert found(r"^\| `(\w+)` \|", commands) == [name for group in COMMANDS.values() for name in group]
    codes = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert {int(code) for code in found(r"^\| (\d+) \|", commands)} == codes
    ours = {path.stem for path in (ROOT / "halotile/tasks/denoisers").glob("[!_]*.py")} - {"base"}
    assert set(found(r"^\| `(\w+)` \| (?:\*\*`\w+`.* )?\| .* \|$", denoisers)) == ours
    assert ours <= set(registry.names("denoisers"))
    rows = found(r"^\| (`.*?) \|", install[install.index("| extra |") : install.index("## Platforms")])
    assert {name for row in rows for name in found(r"`([\w-]+)`", row)} == set(project()["optional-dependencies"])
    notes = sorted((ROOT / "docs/design").glob("*.md"))
    titles = [f"- [{path.read_text().splitlines()[0][2:]}](design/{path.name})" for path in notes]
    assert [line for line in design.splitlines() if line.startswith("- ")] == titles
    assert sorted(found(r"^::: halotile\.(\w+)$", api)) == sorted([*halotile.__all__, "errors"])


def test_a_public_module_can_be_imported_by_its_name() -> None:
    for name in ("collectives", "posterior", "ptychography", "torch_group"):
        module = importlib.import_module(f"halotile.{name}")
        assert getattr(halotile, name) is module
        assert [each for each in module.__all__ if not hasattr(module, each)] == []
        assert module.__doc__ is not None
        assert not module.__doc__.startswith("The public name")


def test_tests_that_the_security_page_names_exist() -> None:
    named = set(re.findall(r"`((?:tests/\w+/)?test_\w+\.py)`", (ROOT / "docs/security.md").read_text()))
    tests = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(named) > 10
    assert [name for name in sorted(named) if not any(path.endswith(name) for path in tests)] == []


def test_strengths_have_one_meaning_but_where_the_other_is_explained() -> None:
    """In noise levels: a number beside a sigma."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    paths += [path for path in (ROOT / "halotile").rglob("*.py") if ">>> halotile.denoise(" in path.read_text()]
    settings = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in paths
        if path.suffix in (".md", ".yaml", ".py")
        for line in path.read_text().splitlines()
        if re.search(r"""(tv|nlm)["']?, .*strength[:=] ?[0-9]""", line) and "sigma" not in line
    }
    assert settings == set()


DOCS = ROOT / "docs"


EXAMPLES = {
    "denoise": ("job-file.md", "every-key.yaml"),
    "reconstruct": ("reconstruction.md", "every-key-of-a-reconstruction.yaml"),
    "simulate": ("reconstruction.md", "every-key-of-a-simulation.yaml"),
    "ptychography": ("ptychography.md", "every-key-of-ptychography.yaml"),
    "samples": ("samples.md", "every-key-of-samples.yaml"),
    "train": ("training.md", "every-key-of-a-training.yaml"),
}


SHARED = {
    "denoise": (),
    "reconstruct": ("output", "tile", "run", "cluster"),
    "simulate": ("run", "cluster"),
    "ptychography": ("run", "cluster"),
    "samples": ("input", "denoiser", "noise", "tile", "run", "cluster"),
    "train": ("input", "run", "cluster"),
}


"""Sections that are those of a denoising job."""


ADVISED = {("denoise", "denoiser"): {"sigma": "auto"}}


"""Values other than the defaults that every example has."""


SECTIONS = [(job, name) for job in kind_names() for name in keys_of_job(job).sections if name not in SHARED[job]]


@pytest.fixture(scope="module")
def documented() -> dict[str, dict[str, Any]]:
    """The job files with every key, by kind of job."""
    found = {}
    for job, (page, name) in EXAMPLES.items():
        text = (DOCS / page).read_text()
        block = re.search(rf"```yaml\n# {re.escape(name)}\n(.*?)```", text, re.DOTALL)
        assert block
        found[job] = read_text(block[1], page).tree
    return found


def test_the_examples_have_every_part(documented: dict[str, dict[str, Any]]) -> None:
    for job, part in zip(kind_names(), config_schema()["anyOf"], strict=True):
        left_out = {*SHARED[job]} - {"input", "output"}
        assert set(documented[job]) == set(part["properties"]) - left_out


def check_values(where: str, written: dict[str, Any], keys: Keys) -> None:
    """Assert that every key is there with its default."""
    assert set(written) == set(keys), where
    for key, kind in keys.items():
        if not kind.is_required:
            usual = {} if kind.field.default is dataclasses.MISSING else kind.field.default
            assert written[key] == (list(usual) if isinstance(usual, tuple) else usual), (where, key)


def test_the_examples_have_every_key_with_its_default_outside_of_sections_and_of_an_operator_too(
    documented: dict[str, dict[str, Any]],
) -> None:
    for job, section in SECTIONS:
        written, schema = dict(documented[job][section]), keys_of_job(job).sections[section]
        for key, value in ADVISED.get((job, section), {}).items():
            assert written[key] == value
            written[key] = None
        keys = keys_of(schema)
        if issubclass(schema, NamedChoice):
            keys = written_keys(schema.declared(written.pop("name")), schema)
        check_values(f"{job}: {section}", written, keys)
    for job in ("ptychography", "reconstruct", "samples", "simulate", "train"):
        keys = keys_of_job(job).values
        assert keys
        check_values(job, {key: documented[job][key] for key in keys}, keys)
    for job, choice in (("reconstruct", OperatorChoice), ("samples", MeasuredOperator), ("simulate", OperatorChoice)):
        operator = dict(documented[job]["operators"][0])
        check_values(job, operator, written_keys(choice.declared(operator.pop("name")), choice))


def test_tables_have_every_name_with_its_options_and_mark_those_that_must_be_written() -> None:
    for name in registry.names("denoisers"):
        check_row("denoisers.md", name, registry.find("denoisers", name).DENOISER)
    for name in registry.names("networks"):
        check_row("training.md", name, registry.find("networks", name).NETWORK)
    for name in OperatorChoice.accepted():
        check_row("operators.md", name, OperatorChoice.declared(name))


def check_row(page: str, name: str, schema: type) -> None:
    """Assert that a row of a page's table has every option, and marks those that must be written."""
    found = re.search(rf"^\| `{name}` \| (.*?) \|", (DOCS / page).read_text(), re.MULTILINE)
    assert found, f"the table of {page} has no {name}"
    row = found[1]
    assert set(re.findall(r"`(\w+)`", row)) == set(keys_of(schema)), name
    required = {key for key, kind in keys_of(schema).items() if kind.is_required}
    assert set(re.findall(r"\*\*`(\w+)`\*\*", row)) == required, name


NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", (DOCS / "distribute.md").read_text()))))


TORCH_PAGE = (DOCS / "torch.md").read_text()


# Those of version 2.2: functions, classes and their methods.
NAMES = """
AllGatherVAutograd DistributedIRFFT2 DistributedManager DistributedRFFT2 GatherVAutograd IndexedAllToAllVAutograd
PhysicsNeMoUndefinedGroupError PhysicsNeMoUninitializedDistributedManagerWarning ProcessGroupConfig ProcessGroupNode
ScatterVAutograd add_node all_gather_v all_gather_v_bwd_wrapper all_gather_v_wrapper broadcast_buffers cleanup
compute_split_shapes conj_pad_helper_2d copy_to_parallel_region create_group_from_node create_groups_from_config
create_orthogonal_process_group create_process_subgroup cuda device distributed distributed_transpose
find_unused_parameters fused_all_reduce gather_from_parallel_region gather_v gather_v_wrapper get_available_backend
get_memory_format get_mesh_group get_node global_mesh group group_name group_names group_rank group_size
indexed_all_to_all_v indexed_all_to_all_v_wrapper indexed_all_to_all_v_wrapper_bwd initialize initialize_env
initialize_mesh initialize_open_mpi initialize_slurm is_initialized leaf_groups local_rank mark_module_as_shared mesh
mesh_dims mesh_names mesh_sizes pad_helper rank reduce_from_parallel_region reduce_loss scatter_to_parallel_region
scatter_v scatter_v_wrapper set_leaf_group_sizes setup split_tensor_along_dim truncate_helper unmark_module_as_shared
update_parent_sizes world_size
"""


def public_names(peer: Any) -> set[str]:
    """Functions, classes and their methods."""
    names: set[str] = set()
    for module in (importlib.import_module(m.name) for m in pkgutil.walk_packages(peer.__path__, f"{peer.__name__}.")):
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__ or name.startswith("_"):
                continue
            names.add(name)
            if inspect.isclass(value):
                names |= {method for method, member in vars(value).items() if callable(member)}
    return {name for name in names - {"backward", "Index"} if not name.startswith("_")}


def keywords(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def test_the_two_names_take_what_those_of_deepinv_take_and_the_page_has_every_name() -> None:
    from halotile.graphs.distributed.distribute import IGNORED_KEYWORDS

    ours = keywords(halotile.distribute), keywords(halotile.DistributedContext)
    assert sorted(set.union(*ours) - NAMED) == []
    peer = pytest.importorskip("deepinv.distributed")
    names, theirs = public_names(peer), (keywords(peer.distribute), keywords(peer.DistributedContext))
    assert {"distribute", "TilingStrategy", "map_reduce_gather", "A_vjp", "all_gather"} <= names
    expected = {name for name in vars(peer.DistributedContext()) if not name.startswith("_")}  # of one that is not open
    assert sorted((names | expected).union(*theirs) - NAMED) == []
    assert theirs[0] <= ours[0] | set(IGNORED_KEYWORDS)
    assert theirs[1] <= ours[1]
    expected |= {n for n, value in vars(peer.DistributedContext).items() if callable(value) and not n.startswith("_")}
    context = halotile.DistributedContext(device_mode="cpu")
    assert [name for name in sorted(expected) if not hasattr(context, name)] == []


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a title."""
    part = TORCH_PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_public_name_is_in_the_first_column() -> None:
    cells = " ".join(first for first, *_ in rows("Coming from PhysicsNeMo"))
    shown = re.findall(r"\*?\w+", " ".join(re.findall(r"`([^`\n]+)`", cells)))
    assert sorted(name for name in NAMES.split() if not any(fnmatch(name, word) for word in shown)) == []


@pytest.mark.parametrize("title", ["Coming from PhysicsNeMo", "Coming from CDTools"])
def test_what_is_left_out_has_a_reason(title: str) -> None:
    table = rows(title)
    assert len(table) > 5
    left_out = [row for row in table if "–" in row[0] + row[1]]
    assert left_out
    assert [row for row in left_out if len(row) == 3 and not row[2]] == []
    assert [row for row in left_out if len(row) == 2 and not re.search(r"– : \w", row[1])] == []


ON_LINUX = {"extra": "", "python_version": "3.12", "sys_platform": "linux", "platform_machine": "x86_64"}


GPU_PAGE = (ROOT / "docs/gpu.md").read_text()


def fetched() -> list[str]:
    """The packages that are fetched."""
    lines = (ROOT / "requirements-gpu-wheels.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def taken_to_be_there() -> set[str]:
    """The packages that the page says are on the machine."""
    listed = re.search(r"Assumed to be there: (.*?), with their dependencies", GPU_PAGE, re.DOTALL)
    assert listed
    return {word.split()[0] for word in re.split(r",\s+|\s+and\s+", listed[1])}


def needs_of(name: str) -> set[str]:
    """What a package requires, as far as it is installed here to be asked."""
    try:
        wanted = [Requirement(line) for line in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return set()
    return {canonicalize_name(each.name) for each in wanted if not each.marker or each.marker.evaluate(ON_LINUX)}


def test_what_halotile_needs_is_fetched_in_the_tested_version_or_taken_to_be_there() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in fetched() if name not in pinned] == []
    assert fetched() == sorted(fetched())
    wanted = [*project()["dependencies"], *project()["optional-dependencies"]["cuda"]]
    # The settings of pytest-timeout are in pyproject.toml, and pytest refuses those of a plug-in that is not there.
    needed = {canonicalize_name(Requirement(line).name) for line in wanted} | {"pytest-timeout"}
    for name in fetched():
        needed |= needs_of(name)
    assert needed - set(fetched()) - taken_to_be_there() == set()
    assert taken_to_be_there() & set(fetched()) == set()


def test_the_page_fetches_as_make_does() -> None:
    commands = {
        " ".join(text.split())
        for text in re.findall(r"^\$ pip ((?:.*\\\n)*.*)$", GPU_PAGE.replace("\\\n", " \\\n"), re.MULTILINE)
    }
    recipe = " ".join((ROOT / "Makefile").read_text().split())
    fetching = [command for command in commands if command.startswith(("download", "wheel"))]
    assert len(fetching) == 2
    for command in fetching:
        assert command in recipe
