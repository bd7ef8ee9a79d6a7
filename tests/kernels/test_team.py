"""The thread team: barriers hold, workers sleep and wake, more threads than cores still finish."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels import jit
from vllm_cpp.kernels.cpu.fields import field
from vllm_cpp.kernels.cpu.team import _ASLEEP, _BED_WORDS, _BEDS, Team
from vllm_cpp.kernels.records import pack
from vllm_cpp.kernels.simd import i64, load, store
from vllm_cpp.models.program import Program

FIELDS = ("source", "target", "n")


@jit.op
def rotate_and_count(args, tid, nth):
    """target[i] = source[i + 1] + 1, shared out so that every thread needs what another wrote in the operation before."""
    n = field(args, 2)
    for i in range(tid, n, nth):
        store(field(args, 1) + 8 * i, load(i64, field(args, 0) + 8 * ((i + 1) % n)) + 1)


@pytest.fixture(params=[1, 2, 5])
def team(request):
    team = Team(request.param)
    yield team
    team.close()


def rotations(n: int, times: int) -> tuple[Program, np.ndarray, list[np.ndarray]]:
    # The table holds addresses only: whoever runs it keeps the program.
    buffers = [np.arange(n, dtype=np.int64), np.zeros(n, np.int64)]
    program = Program()
    for i in range(times):
        source, target = buffers[i % 2], buffers[1 - i % 2]
        program.add(rotate_and_count, pack(FIELDS, source=source.ctypes.data, target=target.ctypes.data, n=n), f"rotation {i}")
    return program, program.table(), buffers


def test_every_thread_sees_what_was_written_before_a_barrier(team):
    n, times = 64, 200
    _program, table, buffers = rotations(n, times)
    for _ in range(5):
        buffers[0][:] = np.arange(n)
        team.run(table)
        assert np.array_equal(buffers[times % 2], (np.arange(n) + times) % n + times)


@jit.op
def count_down(args, tid, nth):
    """Another round is wanted until the count is 0."""
    if tid == 0:
        store(field(args, 0), load(i64, field(args, 0)) - 1)


def test_a_part_is_run_again_while_a_cell_of_it_says_so(team):
    n, rounds = 64, 37
    buffers = [np.arange(n, dtype=np.int64), np.zeros(n, np.int64)]
    left, program = np.array([rounds], np.int64), Program()
    program.add(count_down, pack(("left",), left=left.ctypes.data), "a round less")
    for source, target in (buffers, buffers[::-1]):
        program.add(rotate_and_count, pack(FIELDS, source=source.ctypes.data, target=target.ctypes.data, n=n), "turn")
    program.repeat_from(0, left.ctypes.data)
    program.add(rotate_and_count, pack(FIELDS, source=buffers[0].ctypes.data, target=buffers[1].ctypes.data, n=n), "turn once more")
    table, times = program.table(), 2 * rounds + 1
    for _ in range(5):
        left[0] = rounds
        buffers[0][:] = np.arange(n)
        team.run(table)
        assert np.array_equal(buffers[1], (np.arange(n) + times) % n + times)
    assert "again from 2 before, while it is asked for" in str(program)


def test_workers_sleep_between_jobs_and_wake_for_the_next(team):
    n = 16
    _program, table, buffers = rotations(n, 2)
    for pause in (0.0, 0.05, 0.0, 0.1):
        time.sleep(pause)
        buffers[0][:] = np.arange(n)
        team.run(table)
        assert np.array_equal(buffers[0], (np.arange(n) + 2) % n + 2)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # 0.3 s of spinning in any worker would show


HELD = """
import ctypes, time
from test_team import rotations, settle
from vllm_cpp.kernels.cpu.team import Team, lead

team = Team(3)
_program, table, buffers = rotations(16, 2)
team.run(table)
settle(team)
held = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(lead.address)  # keeps the GIL until all have done their share
held(team._address, team.size)
assert buffers[0].tolist() == [(i + 4) % 16 + 4 for i in range(16)]
team.close()
"""


def settle(team: Team) -> None:
    """Wait until every worker sleeps."""
    deadline = time.monotonic() + 30
    while team._control[_BEDS + _ASLEEP :: _BED_WORDS].sum() < team.size - 1:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_workers_wake_while_another_thread_holds_the_gil():
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", HELD], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_jobs_that_come_as_workers_fall_asleep_are_not_missed():
    team = Team(3)
    _program, table, buffers = rotations(16, 2)
    for _ in range(5):
        settle(team)
        for _ in range(300):
            buffers[0][:] = np.arange(16)
            team.run(table)
            assert np.array_equal(buffers[0], (np.arange(16) + 2) % 16 + 2)
    team.close()


def test_a_thread_that_cannot_start_is_refused_and_leaves_none(monkeypatch):
    start = threading.Thread.start

    def starts_three(thread):
        if thread.name == "vllm-worker-4":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts_three)
    before = set(threading.enumerate())
    with pytest.raises(ModelLoadError, match=r"no thread for worker 4 of 5: can't start new thread; lower threads or VLLM_CPP_CPU_THREADS"):
        Team(6)
    assert set(threading.enumerate()) <= before


def test_close_ends_the_threads_and_is_safe_twice():
    team = Team(3)
    names = {f"vllm-worker-{tid}" for tid in (1, 2)}
    assert names <= {t.name for t in threading.enumerate()}
    mine = [t for t in threading.enumerate() if t.name in names]
    team.close()
    team.close()
    assert len(mine) == 2
    assert not any(t.is_alive() for t in mine)


def test_a_team_needs_a_thread():
    with pytest.raises(ValueError, match="at least one thread, not 0"):
        Team(0)


def test_a_program_prints_its_operations():
    program, table, _buffers = rotations(4, 2)
    assert table.shape == (2, 3)
    assert "rotate_and_count rotation 1" in " ".join(str(program).split())


def test_the_last_operation_always_has_a_barrier():
    program, _, _buffers = rotations(4, 1)
    program.add(rotate_and_count, program.operations[0].record, "last", barrier=False)
    assert program.table()[:, 2].tolist() == [1, 1]
