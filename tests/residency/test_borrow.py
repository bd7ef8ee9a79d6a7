"""Borrowing: where kept weights stand with mapping on and off, and when they are read in ahead of use."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import tiny_models
from vllm_cpp.config.offload import Residency
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import open_model
from vllm_cpp.residency import borrow, memory
from vllm_cpp.residency.borrow import Weights


@pytest.fixture
def model(tmp_path):
    tiny_models.build("llama", dtype="mix").write(tmp_path / "tiny.gguf")
    with open_model(tmp_path / "tiny.gguf") as opened:
        yield opened


def kept(model):
    return [tensor for tensor in model.tensors.values() if len(tensor.shape) > 1]


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def test_borrowed_weights_are_the_file_itself(model):
    weights = Weights(model, Residency(mmap=True))
    assert [weights.address(tensor) for tensor in kept(model)] == [tensor.address for tensor in kept(model)]
    assert weights.borrowed_bytes == sum(tensor.n_bytes for tensor in kept(model))
    assert weights.copied_bytes == 0


def test_copied_weights_are_the_same_bytes_elsewhere(model):
    weights = Weights(model, Residency(mmap=False))
    for tensor in kept(model):
        address = weights.address(tensor)
        assert address != tensor.address
        assert address % 64 == 0
        assert weights.address(tensor) == address
        assert read(address, tensor.n_bytes) == model.bytes_of(tensor.name).tobytes()
    assert weights.copied_bytes == sum(tensor.n_bytes for tensor in kept(model))
    assert weights.borrowed_bytes == 0
    assert weights.prefault() == 0
    weights.close()
    weights.close()


def test_beside_streamed_experts_all_but_towers_are_copied(tmp_path):
    tiny_models.build("llama_moe", dtype="mix").write(tmp_path / "moe.gguf")
    with open_model(tmp_path / "moe.gguf") as model:
        towers = [tensor for tensor in model.tensors.values() if len(tensor.shape) == 3]
        dense = next(tensor for tensor in model.tensors.values() if len(tensor.shape) == 2)
        weights = Weights(model, Residency(), streamed={towers[0].name})
        assert [weights.address(tensor) for tensor in towers] == [tensor.address for tensor in towers]
        assert weights.address(dense) != dense.address
        assert weights.borrowed_bytes == sum(tensor.n_bytes for tensor in towers[1:])  # prefault leaves streamed ones on disk
        assert weights.copied_bytes == dense.n_bytes
        weights.close()


def test_copies_ask_for_large_pages(model):
    """VmFlags of their mapping: "hg", and not "sh", which would be shared memory and has rules of its own."""
    weights = Weights(model, Residency(mmap=False))
    address = weights.address(kept(model)[0])
    flags = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
        elif first == "VmFlags:" and start <= address < end:
            flags = set(line.split()[1:])
    assert "sh" not in flags
    assert ("hg" in flags) == Path("/sys/kernel/mm/transparent_hugepage").exists()
    weights.close()


def test_a_file_that_shrank_is_named(model, monkeypatch):
    monkeypatch.setattr(borrow.os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: the file ends inside tensor"):
        Weights(model, Residency(mmap=False)).address(kept(model)[0])


@pytest.mark.parametrize(
    ("asked", "room", "reads", "says"),
    [
        (None, 1 << 40, True, ""),
        (None, None, True, ""),
        (True, 1 << 40, True, ""),
        (False, 1 << 40, False, ""),
        (None, 1000, False, ""),
        (True, 1000, False, "prefault skipped"),
    ],
)
def test_the_borrowed_bytes_are_read_in_only_while_they_fit(model, monkeypatch, capfd, asked, room, reads, says):
    monkeypatch.setattr(borrow, "available_bytes", lambda: room)
    weights = Weights(model, Residency(prefault=asked))
    for tensor in kept(model):
        weights.address(tensor)
    heard = []
    assert weights.prefault(lambda what, fraction: heard.append(fraction)) == (weights.borrowed_bytes if reads else 0)
    assert heard == sorted(heard)
    assert heard[-1:] == ([1.0] if reads else [])
    said = capfd.readouterr().err
    assert says in said
    assert bool(says) == bool(said)


def test_an_older_kernel_is_asked_in_the_older_way(model, monkeypatch):
    asked = []

    def madvise(address, size, advice):
        asked.append(advice)
        ctypes.set_errno(22)
        return 0 if advice == 3 else -1

    monkeypatch.setattr(borrow, "_madvise", madvise)
    weights = Weights(model, Residency())
    weights.address(kept(model)[0])
    assert weights.prefault() == weights.borrowed_bytes
    assert asked == [22, 3]


def test_a_read_that_fails_stops_the_reading_in_and_nothing_else(model, monkeypatch):
    monkeypatch.setattr(borrow, "_madvise", lambda address, size, advice: ctypes.set_errno(14) or -1)
    weights = Weights(model, Residency())
    weights.address(kept(model)[0])
    assert weights.prefault() == 0


MEMINFO = "MemTotal:  8000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        ({"/proc/meminfo": MEMINFO}, 4000 * 1024),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "5\n"}, 4000 * 1024),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "100000\n",
                "/sys/fs/cgroup/memory.current": "90000\n",
                "/sys/fs/cgroup/memory.stat": "anon 20000\nfile 70000\n",
            },
            80000,
        ),
        (
            {
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "9000\n",
                "/sys/fs/cgroup/memory/memory.stat": "cache 1\ntotal_cache 2000\n",
            },
            0,
        ),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096), "/sys/fs/cgroup/memory/memory.usage_in_bytes": "9"}, None),
        (
            {
                "/proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/one/two\n0::/\n",
                "/sys/fs/cgroup/memory/other/memory.limit_in_bytes": "1\n",
                "/sys/fs/cgroup/memory/other/memory.usage_in_bytes": "1\n",
                "/sys/fs/cgroup/memory/one/two/memory.limit_in_bytes": "8000\n",
                "/sys/fs/cgroup/memory/one/two/memory.usage_in_bytes": "7000\n",
                "/sys/fs/cgroup/memory/one/two/memory.stat": "total_cache 500\n",
                "/sys/fs/cgroup/memory/one/memory.limit_in_bytes": "9000\n",
                "/sys/fs/cgroup/memory/one/memory.usage_in_bytes": "8000\n",
            },
            1000,
        ),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/memory.max": "max\n",
                "/sys/fs/cgroup/a/b/memory.current": "10\n",
                "/sys/fs/cgroup/a/memory.max": "300\n",
                "/sys/fs/cgroup/a/memory.current": "100\n",
            },
            200,
        ),
    ],
)
def test_available_memory(monkeypatch, files, available):
    monkeypatch.setattr(memory, "_text", lambda path: files.get(path, ""))
    assert memory.available_bytes() == available
