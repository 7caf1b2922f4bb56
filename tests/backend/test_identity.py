"""What the CPU backend says of this machine."""

import resource

import pytest

from ucudnn.backends.torch_cpu.processor import available_memory_bytes, cpu_device

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "expected"), [(str(3 * GIB), 2 * GIB), ("max", 8 * GIB), (str(GIB // 2), 0)]
)
@pytest.mark.parametrize(
    "names",
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_containers_limit_counts(tmp_path, names, limit, expected):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 << 20} kB\n")
    for name, text in zip(names, (limit, str(GIB)), strict=True):
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory_bytes(tmp_path) == expected
    path.with_name("memory.stat").write_text(f"active_file 7\ninactive_file {GIB // 4}\n")
    if limit != "max":
        assert available_memory_bytes(tmp_path) == max(int(limit) - GIB * 3 // 4, 0)


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::/job/step", "", "memory.max", "memory.current"),
        ("4:cpu,memory:/job/step", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        # as a container without a namespace of its own sees it
        ("0::/docker/1f/job/step", "", "memory.max", "memory.current"),
    ],
)
def test_the_tightest_of_nested_control_groups_counts(tmp_path, line, folder, limit, used):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable:   {8 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"3:pids:/other\n{line}\n")
    outermost = tmp_path / "sys/fs/cgroup" / folder
    step = outermost / "job/step"
    step.mkdir(parents=True)
    for group, most in ((outermost, 7), (step.parent, 3), (step, 5)):
        (group / limit).write_text(f"{most * GIB}\n")
        (group / used).write_text(f"{GIB}\n")
        assert available_memory_bytes(tmp_path) == (most - 1 if group != step else 2) * GIB
    (step.parent / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {GIB // 2}\n")
    assert available_memory_bytes(tmp_path) == 2 * GIB + GIB // 2


@pytest.mark.process
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limits of a process")
@pytest.mark.parametrize(("limit", "name"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_a_limit_of_the_process_counts(python, limit, name):
    done = python("-c", LIMITED, limit, name)
    assert 200 <= int(done.stdout) <= 257


# Half of what is said to be available can be allocated, and twice as much cannot.
LIMITED = """
import re, resource, sys
from pathlib import Path
import torch
from ucudnn.backends.torch_cpu.processor import available_memory_bytes
limit, name = sys.argv[1:]
status = Path("/proc/self/status").read_text()
used = int(re.search(rf"{name}:\\s+(\\d+)", status)[1]) << 10
resource.setrlimit(getattr(resource, limit), (used + (256 << 20),) * 2)
found = available_memory_bytes()
torch.empty(found // 2, dtype=torch.uint8)
try:
    torch.empty(2 * found, dtype=torch.uint8)
except RuntimeError:
    print(found >> 20)
"""


def test_a_limit_of_onednns_instructions_makes_another_device(monkeypatch):
    """Times taken with it are not those without."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    unlimited = cpu_device()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "all")
    assert cpu_device() == unlimited
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
    assert cpu_device() != unlimited
