"""The kernel cache: a damaged file, a full disk or a missing home costs a compilation and a line, and nothing else."""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_cpp import log
from vllm_cpp.kernels import cache
from vllm_cpp.kernels.jit import Kernel


def nothing(address: int) -> None:
    pass


def fresh() -> Kernel:
    """The kernel as a new process has it: compiled, or loaded, once more."""
    kernel = Kernel(nothing, 1)
    kernel(0)
    return kernel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CPP_CACHE_DIR", str(tmp_path))
    log.forget()
    return tmp_path / "kernels"


def file(folder: Path, suffix: str) -> Path:
    [path] = folder.glob(f"*{suffix}")
    return path


def flip_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "noise": lambda path: path.write_bytes(b"\x93" * 64),
    "flipped": flip_the_middle,
}


@pytest.mark.parametrize(("suffix", "damage"), [(".nbi", "empty"), (".nbi", "cut"), (".nbi", "noise"), *((".nbc", how) for how in DAMAGES)])
def test_a_damaged_file_is_a_miss(folder: Path, capfd: pytest.CaptureFixture[str], suffix: str, damage: str) -> None:
    assert not fresh().from_cache
    assert fresh().from_cache
    DAMAGES[damage](file(folder, suffix))
    capfd.readouterr()
    assert not fresh().from_cache
    assert capfd.readouterr().err.count("cannot use a file in ") == 1
    assert fresh().from_cache


def test_a_full_disk_keeps_nothing_and_says_so_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        kernels = [fresh(), fresh()]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [kernel.from_cache for kernel in kernels] == [False, False]
    said = capfd.readouterr().err
    assert said.count("what was compiled is not kept") == 1
    assert "VLLM_CPP_CACHE_DIR" in said
    assert not list(folder.glob("*.tmp.*"))


def test_the_variable_is_read_at_each_first_use(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh()
    monkeypatch.setenv("VLLM_CPP_CACHE_DIR", str(tmp_path / "other"))
    assert not fresh().from_cache
    assert file(tmp_path / "other" / "kernels", ".nbi").name == file(folder, ".nbi").name


def test_the_home_is_the_one_that_libc_has(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VLLM_CPP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "")
    ctypes.CDLL(None).setenv(b"HOME", os.fsencode(tmp_path), 1)
    assert cache.root() == tmp_path / ".cache" / "vllm_cpp"


def test_a_folder_that_cannot_be_written_gives_way_to_a_temporary_one_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CPP_CACHE_DIR", str(tmp_path / "file" / "below"))  # whoever runs this, root too, cannot write there
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._usable.cache_clear()
    assert not fresh().from_cache
    assert fresh().from_cache
    cache._usable.cache_clear()
    said = capfd.readouterr().err
    assert said.count(f"kernels: cannot write the cache folder {tmp_path}/file/below (") == 1
    assert f"compiled kernels go to {tmp_path}/vllm_cpp-{os.getuid()}, as long as that lasts" in said
    assert list((tmp_path / f"vllm_cpp-{os.getuid()}" / "kernels").glob("*.nbi"))


def test_processes_that_compile_at_once_leave_a_cache_that_serves(folder: Path) -> None:
    """Two fill an empty cache with the same kernels, at the same time; a third finds every one of them, whole."""
    code = """
import numpy as np
from vllm_cpp.kernels.cpu.encodings import bf16, f16, f32
for kernels, kind in ((f32, np.float32), (f16, np.float16), (bf16, np.float32)):
    values, out = np.arange(1, 33).astype(kind), np.zeros(32, np.float32)
    given = (values.view(np.uint32) >> 16).astype(np.uint16) if kernels is bf16 else values
    kernels.decode(given.ctypes.data, 32, out.ctypes.data)
    assert (out == np.arange(1, 33)).all(), kernels
    print(kernels.decode.from_cache)
"""

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    for program in [start(), start()]:
        assert program.communicate(timeout=120)[0].split()[-1] in ("False", "True")
        assert program.returncode == 0
    third = start()
    out, err = third.communicate(timeout=120)
    assert (third.returncode, out.split(), err) == (0, ["True"] * 3, "")


@pytest.fixture
def nobody(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without a home, as containers have them; returns the folder that such a user gets."""

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("VLLM_CPP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._usable.cache_clear()
    yield tmp_path / f"vllm_cpp-{os.getuid()}"
    cache._usable.cache_clear()


def test_without_a_home_one_private_temporary_folder_serves_all(nobody: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cache.root() == nobody
        cache._usable.cache_clear()
    assert nobody.stat().st_mode & 0o777 == 0o700
    assert not fresh().from_cache
    assert fresh().from_cache
    assert capfd.readouterr().err.count(f"HOME is not set, and the system does not know user id {os.getuid()}; ") == 1


@pytest.mark.parametrize("taken", ["open to all", "a link"])
def test_a_folder_that_others_may_write_is_not_loaded_from(nobody: Path, capfd: pytest.CaptureFixture[str], taken: str) -> None:
    """What is loaded from the cache is run."""
    if taken == "a link":
        nobody.symlink_to(tempfile.mkdtemp())
    else:
        nobody.mkdir()
        nobody.chmod(0o777)
    assert cache.root() is None
    assert [fresh().from_cache, fresh().from_cache] == [False, False]
    assert capfd.readouterr().err.count("compiled kernels are not kept") == 1
    assert list(nobody.iterdir()) == []


def test_what_nobody_loads_is_removed_and_what_is_loaded_stays(folder: Path) -> None:
    fresh()
    old = time.time() - (cache.KEPT_DAYS + 1) * 86400
    left = [folder / name for name in ("a.py311.nbi", "a.py311.1.nbc", "a.py311.nbi.tmp.0123", "notes.txt")]
    for path in (*left, file(folder, ".nbi"), file(folder, ".nbc")):
        path.touch()
        os.utime(path, (old, old))
    assert fresh().from_cache
    cache.prune.cache_clear()
    cache.prune(folder)
    assert [path.exists() for path in left] == [False, False, False, True]
    assert fresh().from_cache
