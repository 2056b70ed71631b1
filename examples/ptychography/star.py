"""A Siemens star from its near-field patterns: ``python examples/ptychography/star.py [--out star] [--workers 2] [--epochs 150]``.

Writes the scan as a Zarr, the result as a CXI file, and a sheet with object, probe, losses, positions and resolution.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import halotile

SCAN = Path(__file__).with_name("petra.cxi")


def recon_cli(*words: str | Path) -> None:
    """Run a command of halotile."""
    subprocess.run([sys.executable, "-m", "halotile", *map(str, words)], check=True)


def main() -> None:
    """Convert, reconstruct, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("star"), help="folder of all files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=150)
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    recon_cli("convert", SCAN, given.out / "scan.zarr", "--overwrite")

    scan = halotile.ptychography.open(given.out / "scan.zarr", field="near", focus="3.65 mm", resolution=True)
    fast = -(-2 * given.epochs // 3)
    with halotile.ptychography.Adam(scan, workers=given.workers) as adam:
        for epochs, rate, batch in ((fast, 0.04, 10), (given.epochs - fast, 0.005, 50)):
            for _ in adam.optimize(epochs, lr=rate, batch_size=batch):
                print(scan.report(), flush=True)
    scan.save(given.out / "star.cxi")
    recon_cli("export", given.out / "star.cxi", given.out / "star.png", "--overwrite")
    print(f"{given.out / 'star.png'} shows it")


if __name__ == "__main__":
    main()
