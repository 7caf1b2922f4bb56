"""What the CPU backend says of this machine."""

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


def test_a_limit_of_onednns_instructions_makes_another_device(monkeypatch):
    """Times taken with it are not those without."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    unlimited = cpu_device()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "all")
    assert cpu_device() == unlimited
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
    assert cpu_device() != unlimited
