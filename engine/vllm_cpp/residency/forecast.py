"""What streaming a file would bring on this machine: how many slots fit, what part of the slices they would serve, and how fast that is.

Owns the sizing rule, the hit rates it counts on and where those come from, and the arithmetic. The speeds of drive and memory are measured
(`disk.py`, `memory.py`), which takes a second at most. Must not know how a forecast is shown, nor decide anything for a load.

Hits. Replayed through the store that serves, the recorded routing of two real models (Qwen3-30B-A3B, 6 of 128 experts; gpt-oss-120b, 2 of
128; `python -m benchmarks.policy --shares`) hits alike when the slots hold the same *share* of all slices: within 8 points, whatever it is.
So the mean of the two is read off at the share that the slots would hold. A model whose router chooses more evenly hits less, and one whose
choices are all alike hits just that share, which is given beside it.

Speed. A token computes for as long as memory takes to bring what it uses (everything dense, its slices), and reads what is missed from the
drive. The two overlap in part; their sum is what to expect, and the longer one alone is the bound.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_cpp import env
from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.kernels.cpu.slots import ALIGNMENT
from vllm_cpp.residency import disk, memory
from vllm_cpp.residency.plan import Plan
from vllm_cpp.residency.slots import cell_bytes

RECORDED: Final = (
    (0.0, 0.0), (0.0078, 0.13), (0.0156, 0.22), (0.0234, 0.28), (0.0312, 0.34), (0.0469, 0.43), (0.0625, 0.50), (0.0938, 0.60),
    (0.125, 0.66), (0.1875, 0.76), (0.25, 0.82), (0.375, 0.90), (0.5, 0.93), (1.0, 1.0),
)  # fmt: skip
"""(share of all slices that slots hold, part of the slices asked for that are there). The last one is no record: a first use is a miss, and
later there is none."""
WORKING_BYTES: Final = 256 << 20
"""For the interpreter, compiled kernels and what a step computes in."""
_SPARED: Final = 0.05  # of what the machine has available: others use this memory as well
_TOKEN_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a number of slots would bring. `share` is of all slices, `tokens` of one token's. The rates are parts of the slices asked for,
    the times seconds a token; None where the drive or memory could not be measured."""

    slots: int
    arena_bytes: int
    share: float
    tokens: float
    hit_rate: float
    even_hit_rate: float
    compute_s: float | None
    read_s: float | None
    even_read_s: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """As recorded routing would have it."""
        return _rate(self.compute_s, self.read_s)

    @property
    def even_tokens_per_s(self) -> float | None:
        """If every expert were as likely as any other."""
        return _rate(self.compute_s, self.even_read_s)

    @property
    def bound_tokens_per_s(self) -> float | None:
        """If reading and computing overlapped wholly."""
        return None if self.compute_s is None or self.read_s is None else 1 / max(self.compute_s, self.read_s)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """`fits`: the whole file has room in memory, so that streaming has nothing to gain; None where the system does not say. `room_bytes`
    is what an arena may take: what is available without everything dense, the KV cache, the states of running sequences and what is spared.
    `proposed` is None where not even one expert's slices find room, `asked` unless something is streamed."""

    fits: bool | None
    kv_bytes: int
    state_bytes: int
    spare_bytes: int
    room_bytes: int
    drive: disk.Measured | None
    memory: memory.Measured | None
    proposed: Expectation | None
    asked: Expectation | None

    @property
    def measuring_s(self) -> float:
        return sum(one.seconds for one in (self.drive, self.memory) if one is not None)


def hit_rate(share: float) -> float:
    """The part of the slices asked for that are there while slots hold that share of all, straight between the records."""
    at = min(bisect_right(RECORDED, (share, 2.0)), len(RECORDED) - 1)
    (before, low), (after, high) = RECORDED[at - 1 : at + 1]
    return low + (high - low) * min((share - before) / (after - before), 1.0)


def make(plan: Plan, model: GGUFModel, *, kv_bytes: int, threads: int, state_bytes: int = 0) -> Forecast | None:
    """The forecast for an opened file; None where it has no routed experts. `kv_bytes` of KV cache, `state_bytes` of what running sequences
    keep beside it, and `threads` are those of the engine to come."""
    if not plan.towers:
        return None
    total_slices = sum(plan.slices.values())
    available = plan.available_bytes
    spare = WORKING_BYTES + _for_others(available, plan.machine_bytes)
    beside = plan.dense_bytes + kv_bytes + state_bytes + spare
    room = max(0, available - beside) if available is not None else total_slices * cell_bytes(plan.largest_slice)
    speeds = measure_drive(model, plan), memory.measure(threads, room)
    slots = min(total_slices, room // cell_bytes(plan.largest_slice))
    return Forecast(
        fits=None if available is None else plan.tower_bytes + beside <= available,
        kv_bytes=kv_bytes,
        state_bytes=state_bytes,
        spare_bytes=spare,
        room_bytes=room,
        drive=speeds[0],
        memory=speeds[1],
        proposed=_expect(plan, slots, *speeds) if slots >= max(map(len, plan.inventory.towers.values())) else None,
        asked=_expect(plan, plan.residency.expert_stream_slots, *speeds) if plan.streamed else None,
    )


def _for_others(available: int | None, machine: int | None) -> int:
    """What has to be left so that others keep their part of the machine; nothing where a control group leaves less than the rest of it."""
    if available is None or machine is None:
        return 0
    return max(0, available - (machine - int(_SPARED * machine)))


def measure_drive(model: GGUFModel, plan: Plan) -> disk.Measured | None:
    """How fast slices come from the drive, past the page cache; None where the file system reads no other way than through it."""
    names = {tower.name for tower in plan.towers}
    towers = [info for info in model.tensors.values() if info.name in names]
    here = [info for info in towers if info.shard == towers[0].shard]
    places = [(info.file_offset, info.slice_bytes, info.shape[0]) for info in here]
    size = -(-plan.largest_slice // ALIGNMENT) * ALIGNMENT
    lanes = env.number("VT_MOE_EXPERT_STREAM_LANES") or disk.DEFAULT_LANES
    try:
        fd = os.open(f"/proc/self/fd/{model.shards[towers[0].shard].fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    try:
        return disk.measure(fd, places, size, lanes)
    except OSError:
        return None
    finally:
        os.close(fd)


def token_bytes(plan: Plan) -> int:
    """Bytes of weights that computing one token reads: its slices, and everything dense but the rows of other tokens' embeddings."""
    weights = {weight.name: weight for weight in plan.inventory.weights}
    unread = weights[_TOKEN_EMBEDDING].n_bytes if _HEAD in weights and _TOKEN_EMBEDDING in weights else 0
    return plan.working_set[1] + plan.dense_bytes - unread


def _expect(plan: Plan, slots: int, drive: disk.Measured | None, fast: memory.Measured | None) -> Expectation:
    total = sum(plan.slices.values())
    cycle, cycle_bytes = plan.working_set
    share = min(1.0, slots / total)
    hits = hit_rate(share)
    return Expectation(
        slots=slots,
        arena_bytes=slots * cell_bytes(plan.residency.expert_stream_slot_bytes or plan.largest_slice),
        share=share,
        tokens=slots / max(cycle, 1),
        hit_rate=hits,
        even_hit_rate=share,
        compute_s=None if fast is None else token_bytes(plan) / fast.bytes_per_s,
        read_s=None if drive is None else (1 - hits) * cycle_bytes / drive.bytes_per_s,
        even_read_s=None if drive is None else (1 - share) * cycle_bytes / drive.bytes_per_s,
    )


def _rate(*parts: float | None) -> float | None:
    known: Sequence[float] = [part for part in parts if part is not None]
    return 1 / sum(known) if len(known) == len(parts) and sum(known) > 0 else None
