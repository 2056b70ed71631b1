"""Workers of several kinds in one run: their last bits may differ, so the run says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from halotile.graphs.clusters.base import RunningCluster
from halotile.tasks.devices import device as module
from halotile.tasks.devices.device import cpu_kind
from tests.faults import Scene

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: A name with its clock @ 2.10GHz
flags\t\t: fpu sse4_2 avx avx2 {more}

processor\t: 1
vendor_id\t: none
"""


def warnings(scene: Scene) -> list[str]:
    return [event["text"] for event in scene.events("message") if "kinds of CPUs or GPUs" in event["text"]]


@pytest.mark.cluster
def test_blocks_of_another_kind_of_processor_are_reported_once(scene: Scene, cluster: RunningCluster) -> None:
    scene.run(cluster)
    assert scene.directory.read_valid_plan()["processors"] == [cpu_kind()]  # type: ignore[index]
    assert not warnings(scene)
    scene.directory.update_plan(processors=["another kind"])
    for shard in list((scene.output / "c").rglob("*/0"))[:2]:
        shard.unlink()
    scene.run(cluster)
    (said,) = warnings(scene)
    assert said.endswith(f"{cpu_kind()}; before: another kind")
    assert scene.directory.read_valid_plan()["processors"] == ["another kind", cpu_kind()]  # type: ignore[index]


def test_a_processor_is_named_by_what_libraries_choose_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(module, "_CACHE", tmp_path / "size")
    names = set()
    for flag, limit, cache in [("", "", "1M"), ("avx512f", "", "1M"), ("avx512f", "AVX2", "1M"), ("", "", "2M")]:
        (tmp_path / "cpuinfo").write_text(CPUINFO.format(more=flag))
        (tmp_path / "size").write_text(f"{cache}\n")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        names.add(cpu_kind.__wrapped__())
    assert len(names) == 4
    assert all(name.startswith("GenuineIntel 6 143, AVX") and "clock" not in name for name in names)
