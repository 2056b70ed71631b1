"""Compiles the filters in C while the package is installed. Without a C compiler it is installed without them: results are the same, slower."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # python hatch_build.py compiles as well, where hatchling is not installed
    BuildHookInterface = object

ROOT = Path(__file__).parent
FOLDER = ROOT / "halotile/tasks/denoisers/compiled"
NETWORKS = ROOT / "halotile/tasks/convolution/median_networks.py"


class CompileKernels(BuildHookInterface):  # type: ignore[misc]
    """Adds kernels.so to the package, which is then one for this kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless there is no compiler."""
        if self.target_name != "wheel" or not compile_kernels():
            return
        build_data["artifacts"].append("halotile/tasks/denoisers/compiled/kernels.so")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}


def compile_kernels() -> bool:
    """Compile the filters; return False where that is not possible."""
    library = _module("library", FOLDER / "library.py")
    with tempfile.TemporaryDirectory() as folder:
        networks = _module("median_networks", NETWORKS)
        written = _module("networks_in_c", FOLDER / "networks_in_c.py")
        in_c = (written.network_in_c(networks.median_network(size, 2)) for size in networks.SORTED_SIZES)
        Path(folder, "networks.h").write_text("".join(in_c))
        digest = f'const char {library.DIGEST}[] = "{library.digest_of_sources()}";\n'
        Path(folder, "digest.c").write_text(digest)
        sources = sorted(map(str, FOLDER.glob("*.c")))
        try:
            compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
            subprocess.run(
                [
                    *compiler,
                    *sources,
                    f"{folder}/digest.c",
                    f"-I{folder}",
                    *library.FLAGS,
                    "-o",
                    f"{folder}/kernels.so",
                ],
                check=True,
                capture_output=True,
                text=True,
                errors="replace",  # compilers speak the encodings of their users
            )
            _put_in_place(Path(folder, "kernels.so"), library.KERNELS)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            print(f"installed without compiled filters: {error}\n{getattr(error, 'stderr', '')}", file=sys.stderr)
            return False
    return True


def _put_in_place(file: Path, place: Path) -> None:
    """Move a file to a folder on which another installation, or a process that has loaded the old one, may be at work."""
    with tempfile.NamedTemporaryFile(dir=place.parent, prefix="kernels.so.", delete=False) as new:
        new.write(file.read_bytes())
    Path(new.name).chmod(0o755)
    Path(new.name).replace(place)


def _module(name: str, path: Path) -> Any:
    """A module of the package, by itself: what others import is not there yet."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(not compile_kernels())
