"""The slot store's decisions, compiled: which slice is in which slot, which are in use, which go when another is needed.

Owns the layout of the store's records, look-up, protection, eviction and the posting of reads. Must not know how a slice is read
(`reads.py`), what is computed with it (`moe.py`), nor where the memory of these records comes from (`residency/slots.py`).

A slot holds one slice: one expert of one tower. A slice is protected from the moment a layer's operation asked for it until that layer is
done with it, and no longer: so one layer's working set is all that ever has to fit, and what does not fit is worked through in waves of
whole experts.

Three policies choose who goes (words of NEXT below): `NEXT` by the longest expected time until the next use; `LRU` by the longest time
since the last; `DECAY` by the lowest score, which loses 2 % a step and gains 1 a hit, and starts anew with each fill. The last two are
there to be compared with.

NEXT. Each layer remembers how often a token chose each expert, in three memories that survive eviction: of the last token, and of more and
more tokens before it. p, the chance that a token chooses an expert, is a mixture of their shares and of plain chance, in parts that each
layer learns from what is chosen. d is the number of layers until the expert's comes round, L the number of layers: its next use is d + L *
(1/p - 1) layers away.
"""

from __future__ import annotations

from numba import types

from vllm_cpp.kernels import jit, libc, simd
from vllm_cpp.kernels.cpu.fields import field, index, set_index
from vllm_cpp.kernels.simd import i64, load, store
from vllm_cpp.kernels.vectors import Value, unrolled

NEXT, LRU, DECAY = range(3)
POLICIES = {"next": NEXT, "lru": LRU, "decay": DECAY}

# What a token leaves of each memory: nothing, and half every 3 or 16 tokens. The mixture beats one memory of 8 tokens by a point or more on
# the traces we have, and unlike that it follows routing that mostly repeats the last token's.
_LAST, _QUICK, _SLOW = 0.0, 0.5 ** (1 / 3), 0.5 ** (1 / 16)
FIRST_SHARES = (0.1, 0.3, 0.55, 0.05)
"""The mixture that a layer begins with: last, quick, slow, chance."""
_LEARN = 0.05  # of the mixture, a token
_LEARN_AFTER = 3.0  # tokens
_LEAST_P = 1e-6
_SCORE_KEEP = 0.98  # of DECAY, a step

# A prompt needs most experts once: the slices it brings in at a time are this share of all slots, or 4 experts, so that what decoding uses
# stays.
_PROMPT_SHARE = 8
_PROMPT_EXPERTS = 4

ALIGNMENT = 4096
"""Direct reads start and end on these boundaries, in the file and in memory; a slice stands in its slot at the offset it
has in its file page."""

# The store's record, int64s; the words that threads contend for stand on cache lines of their own.
LOCK, TAKEN, POSTED, ENDED_READS, SEMAPHORE, FIELDS = 0, 8, 16, 24, 32, 40
WAITERS = ENDED_READS + 1  # threads that sleep until another read has ended
CROWDED_UNTIL = ENDED_READS + 2  # nanoseconds: until then others want the cores, and nobody waits by yielding
STORE_FIELDS = (
    "slots",  # address of n_slots slot records
    "n_slots", "arena", "cell_bytes",  # where slot 0's bytes are; bytes between two slots' (room for a slice and its alignment)
    "policy",
    "layers", "n_layers",  # address of layer records; how many to look at
    "free",  # i32[n_slots], a stack of free slots; full at first, in the order its owner wants
    "ring",  # i32[n_slots]: slots whose reads were posted, by job number
    "misses",  # i64[n_slots, 2]: tower and expert of the slices that a wave lacks
    "worst", "worst_by", "worst_age",  # i64, f64, f64 [n_slots]: the heap of victims
    "counters",  # i64[8], see below
)  # fmt: skip
(STORE_SLOTS, STORE_N_SLOTS, STORE_ARENA, STORE_CELL_BYTES, _POLICY, _LAYERS, _N_LAYERS, _FREE, STORE_RING, _MISSES, _WORST, _WORST_BY,
 _WORST_AGE, _COUNTERS) = range(FIELDS, FIELDS + len(STORE_FIELDS))  # fmt: skip
# What changes under the lock.
N_FREE, N_UNPINNED, CLOCK, AGE, STOP, READY_CELL, STORE_WORDS = range(FIELDS + 24, FIELDS + 31)

# The words of the counters; the first, steps, is not counted here.
_HITS, _MISSES_COUNTED, _EVICTIONS, _FILLS, BYTES, _EXHAUSTED, _ADVISED = range(1, 8)

# A slot's record is a cache line. `state` is written by the lane that reads, and watched by those who wait.
SLOT_WORDS = 8
SLOT_STATE, SLOT_PINS, SLOT_TOWER, SLOT_EXPERT, _AGE, _LAYER, _HEAT, _SCORE = range(SLOT_WORDS)
EMPTY, FILLING, READY = range(3)  # below 0: failed, the errno negated, or ENDED
ENDED = -4096  # the file ends before the slice does

TOWER_FIELDS = (
    "file",  # address of a file record
    "offset", "slice_bytes",  # where expert 0's slice begins in the file; bytes of each
    "slot_of",  # i32[n_experts]: the slot of an expert's slice, or -1
    "layer",  # number of its layer's record
    "heats",  # f64[n_experts, HEATS] of its layer: the last, quick and slow memory
)  # fmt: skip
TOWER_FILE, TOWER_OFFSET, TOWER_SLICE_BYTES, _TOWER_SLOT_OF, _TOWER_LAYER, _TOWER_HEATS = range(len(TOWER_FIELDS))
HEATS = 3
FILE_FIELDS = ("fd", "direct_fd")  # direct_fd is -1 where the file system refuses direct reads
FILE_FD, FILE_DIRECT_FD = range(len(FILE_FIELDS))

# A layer's record: one of the layers of a model that go round.
LAYER_WORDS = 24
LAYER_MODEL, LAYER_POSITION, LAYER_PERIOD = range(3)  # which model (0: this record is free); 0 ... period - 1; routed layers of the model
_VISITED, LAYER_SHARES, _TOKENS, _CHANCE = 3, 4, 8, 11  # when it was last visited; f64s: the mixture, tokens in each memory, plain chance
_FACTORS, _FLOOR, _NEAR = 12, 15, 16  # f64s, of the scan

VISIT_FIELDS = (
    "again",  # 1: experts are left for another wave
    "n_todo", "n_wave", "n_pinned",
    "failed", "failed_tower", "failed_expert",  # the first slice of this step that could not be read: its state (below 0), tower and expert
    "todo", "wave", "pinned",  # i32[n_experts], i32[n_experts], i32[3 * n_experts]
    "fresh",  # 1: the layer's first wave was acquired and not computed
)  # fmt: skip
(VISIT_AGAIN, _N_TODO, VISIT_N_WAVE, _N_PINNED, VISIT_FAILED, VISIT_FAILED_TOWER, VISIT_FAILED_EXPERT, _TODO, VISIT_WAVE,
 _PINNED, _FRESH) = range(len(VISIT_FIELDS))  # fmt: skip

ACQUIRE_FIELDS = (
    "store", "visit",
    "offsets", "n_experts",  # i32[n_experts + 1]: expert e was chosen offsets[e + 1] - offsets[e] times
    "tokens", "seqs",  # addresses of the int64 numbers of rows and of sequences they belong to
    "n_towers",
    "tower0", "tower1", "tower2",  # the layer's towers, the one that is computed last standing last; 0 behind them
    "mapped0", "mapped1", "mapped2",  # where expert 0's slice is in the caller's mapping
    "places0", "places1", "places2",  # out i64[n_experts, 2] each: where an expert's slice is, and where its state is watched
)  # fmt: skip
(_A_STORE, _A_VISIT, _A_OFFSETS, _A_N_EXPERTS, _A_TOKENS, _A_SEQS, _A_N_TOWERS, _A_TOWER0, _, _, _A_MAPPED0, _, _, _A_PLACES0, _,
 _) = range(len(ACQUIRE_FIELDS))  # fmt: skip
MAX_TOWERS = 3


# ---- words of records


@unrolled
def put(record: Value, i: Value, value: Value) -> None:
    store(record + i * 8, simd.coerce(value, i64))


@unrolled
def real(record: Value, i: Value) -> Value:
    return load(types.float64, record + i * 8)


@unrolled
def put_real(record: Value, i: Value, value: Value) -> None:
    store(record + i * 8, simd.coerce(value, types.float64))


@jit.inner
def slot_at(here, slot):  # type: ignore[no-untyped-def]
    return field(here, STORE_SLOTS) + slot * (8 * SLOT_WORDS)


@jit.inner
def count(here, counter, amount):  # type: ignore[no-untyped-def]
    """Lanes count bytes without the lock, so counters are only ever added to."""
    simd.atomic_add(field(here, _COUNTERS) + 8 * counter, amount)


# ---- the lock: sections of some microseconds, taken by engines, never by lanes


@jit.inner
def _lock(here):  # type: ignore[no-untyped-def]
    while simd.atomic_add(here + 8 * LOCK, 1) != 0:
        spins = 0
        while simd.atomic_load(here + 8 * LOCK) != 0:
            spins += 1
            if spins > 100:
                simd.sched_yield()
            else:
                simd.pause()


@jit.inner
def _unlock(here):  # type: ignore[no-untyped-def]
    simd.atomic_store(here + 8 * LOCK, 0)


# ---- protection


@jit.inner
def _pin(here, visit, slot):  # type: ignore[no-untyped-def]
    record = slot_at(here, slot)
    pins = field(record, SLOT_PINS)
    if pins == 0:
        put(here, N_UNPINNED, field(here, N_UNPINNED) - 1)
    put(record, SLOT_PINS, pins + 1)
    n = field(visit, _N_PINNED)
    set_index(field(visit, _PINNED), n, slot)
    put(visit, _N_PINNED, n + 1)


@jit.inner
def _unpin_last(here, visit):  # type: ignore[no-untyped-def]
    """Take back the newest protection; the slot."""
    n = field(visit, _N_PINNED) - 1
    slot = index(field(visit, _PINNED), n)
    record = slot_at(here, slot)
    pins = field(record, SLOT_PINS) - 1
    put(record, SLOT_PINS, pins)
    if pins == 0:
        put(here, N_UNPINNED, field(here, N_UNPINNED) + 1)
    put(visit, _N_PINNED, n)
    return slot


@jit.inner
def _empty(here, slot):  # type: ignore[no-untyped-def]
    """Forget what an unprotected slot holds and put it on the stack of free ones."""
    record = slot_at(here, slot)
    set_index(field(field(record, SLOT_TOWER), _TOWER_SLOT_OF), field(record, SLOT_EXPERT), -1)
    put(record, SLOT_TOWER, 0)
    simd.atomic_store(record + 8 * SLOT_STATE, EMPTY)
    n = field(here, N_FREE)
    set_index(field(here, _FREE), n, slot)
    put(here, N_FREE, n + 1)


@jit.helper
def _release(here, visit):  # type: ignore[no-untyped-def]
    """End the protection of everything the visit holds. A slot that could not be filled is forgotten, and the visit remembers the first."""
    while field(visit, _N_PINNED) > 0:
        slot = _unpin_last(here, visit)
        record = slot_at(here, slot)
        while simd.atomic_load(record + 8 * SLOT_STATE) == FILLING:  # nobody waits for the rest of an expert that failed
            simd.sched_yield()
        state = field(record, SLOT_STATE)
        if state < 0:
            if field(visit, VISIT_FAILED) == 0:
                put(visit, VISIT_FAILED, state)
                put(visit, VISIT_FAILED_TOWER, field(record, SLOT_TOWER))
                put(visit, VISIT_FAILED_EXPERT, field(record, SLOT_EXPERT))
            if field(record, SLOT_PINS) == 0:
                _empty(here, slot)


# ---- eviction


@jit.inner
def _look_from(here, layer):  # type: ignore[no-untyped-def]
    """For every layer's record what turns heats into a distance as seen from `layer` (see `_badness`)."""
    layers, clock = field(here, _LAYERS), field(here, CLOCK)
    mine = layers + layer * (8 * LAYER_WORDS)
    for i in range(field(here, _N_LAYERS)):
        record = layers + i * (8 * LAYER_WORDS)
        period = field(record, LAYER_PERIOD)
        if field(record, LAYER_MODEL) == 0:
            continue
        ahead = period  # another model's layers: about as far as its farthest
        if field(record, LAYER_MODEL) == field(mine, LAYER_MODEL):
            ahead = field(record, LAYER_POSITION) - field(mine, LAYER_POSITION)
            if ahead <= 0:
                ahead += period
        idle = clock - field(record, _VISITED)
        # What a model that rests would use next comes later with every step of the others.
        fade = _SLOW ** float(idle - 1) if idle > 1 else 1.0
        for part in range(HEATS):
            put_real(record, _FACTORS + part, real(record, LAYER_SHARES + part) / max(real(record, _TOKENS + part), 1.0) * fade)
        put_real(record, _FLOOR, real(record, LAYER_SHARES + HEATS) * real(record, _CHANCE) * fade)
        put_real(record, _NEAR, float(ahead - period))


@jit.inner
def _badness(here, record, policy):  # type: ignore[no-untyped-def]
    """The higher, the sooner a slot goes."""
    if policy == LRU:
        return -float(field(record, _AGE))
    if policy == DECAY:
        return -real(record, _SCORE)
    layer, heat = field(here, _LAYERS) + field(record, _LAYER) * (8 * LAYER_WORDS), field(record, _HEAT)
    p = real(layer, _FLOOR)
    for i in range(HEATS):
        p = p + real(heat, i) * real(layer, _FACTORS + i)
    period = float(field(layer, LAYER_PERIOD))
    return max(period / max(p, _LEAST_P), period) + real(layer, _NEAR)


@jit.inner
def _goes_later(by_a, age_a, by_b, age_b):  # type: ignore[no-untyped-def]
    """Whether slot a stays longer than slot b. Ages are numbers of use: the higher was used last, and stays."""
    return by_a < by_b or (by_a == by_b and age_a > age_b)


@jit.inner
def _place_in_heap(here, at, size, slot, by, age):  # type: ignore[no-untyped-def]
    """Put an entry where position `at` of the heap is vacant, moving others up: its root is the victim that is the best one to keep."""
    slots, bys, ages = field(here, _WORST), field(here, _WORST_BY), field(here, _WORST_AGE)
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _goes_later(real(bys, child + 1), real(ages, child + 1), real(bys, child), real(ages, child)):
            child += 1
        if not _goes_later(real(bys, child), real(ages, child), by, age):
            break
        put(slots, at, field(slots, child))
        put_real(bys, at, real(bys, child))
        put_real(ages, at, real(ages, child))
        at = child
    put(slots, at, slot)
    put_real(bys, at, by)
    put_real(ages, at, age)


@jit.helper
def _evict(here, layer, wanted):  # type: ignore[no-untyped-def]
    """Free `wanted` slots, of which at least so many are unprotected: those that go soonest."""
    policy = field(here, _POLICY)
    if policy == NEXT:
        _look_from(here, layer)
    slots, bys, ages = field(here, _WORST), field(here, _WORST_BY), field(here, _WORST_AGE)
    size = 0
    for slot in range(field(here, STORE_N_SLOTS)):
        record = slot_at(here, slot)
        if field(record, SLOT_PINS) != 0 or field(record, SLOT_TOWER) == 0:
            continue
        by, age = _badness(here, record, policy), float(field(record, _AGE))
        if size < wanted:
            put(slots, size, slot)
            put_real(bys, size, by)
            put_real(ages, size, age)
            size += 1
            if size == wanted:
                for at in range(size // 2 - 1, -1, -1):
                    _place_in_heap(here, at, size, field(slots, at), real(bys, at), real(ages, at))
        elif _goes_later(real(bys, 0), real(ages, 0), by, age):
            _place_in_heap(here, 0, size, slot, by, age)
    for i in range(size):
        _empty(here, field(slots, i))
    count(here, _EVICTIONS, size)


# ---- a layer's visit


@jit.inner
def _learn(args, record, heats):  # type: ignore[no-untyped-def]
    """Move the mixture towards the parts that foresaw this token's choice: each in the proportion in which it made the chosen experts
    likely."""
    offsets, n_experts = field(args, _A_OFFSETS), field(args, _A_N_EXPERTS)
    pairs = float(index(offsets, n_experts))
    last, quick, slow, chance = 0.0, 0.0, 0.0, 0.0
    share_last = real(record, LAYER_SHARES) / real(record, _TOKENS)
    share_quick, share_slow = (
        real(record, LAYER_SHARES + 1) / real(record, _TOKENS + 1),
        real(record, LAYER_SHARES + 2) / real(record, _TOKENS + 2),
    )
    by_chance = real(record, LAYER_SHARES + 3) * real(record, _CHANCE)
    for e in range(n_experts):
        chosen = float(index(offsets, e + 1) - index(offsets, e))
        if chosen > 0.0:
            heat = heats + e * (8 * HEATS)
            by_last, by_quick, by_slow = real(heat, 0) * share_last, real(heat, 1) * share_quick, real(heat, 2) * share_slow
            part = chosen / pairs / (by_last + by_quick + by_slow + by_chance)
            last, quick, slow, chance = last + by_last * part, quick + by_quick * part, slow + by_slow * part, chance + by_chance * part
    put_real(record, LAYER_SHARES, real(record, LAYER_SHARES) * (1.0 - _LEARN) + last * _LEARN)
    put_real(record, LAYER_SHARES + 1, real(record, LAYER_SHARES + 1) * (1.0 - _LEARN) + quick * _LEARN)
    put_real(record, LAYER_SHARES + 2, real(record, LAYER_SHARES + 2) * (1.0 - _LEARN) + slow * _LEARN)
    put_real(record, LAYER_SHARES + 3, max(real(record, LAYER_SHARES + 3) * (1.0 - _LEARN) + chance * _LEARN, _LEAST_P))


@jit.inner
def _remember(here, args, layer):  # type: ignore[no-untyped-def]
    """Add to the layer's memories what this step chose; a step of many tokens counts as that many tokens of each sequence, all alike."""
    tokens, seqs = field(field(args, _A_TOKENS), 0), field(field(args, _A_SEQS), 0)
    each = float(tokens) / float(max(seqs, 1))
    record = field(here, _LAYERS) + layer * (8 * LAYER_WORDS)
    if field(record, LAYER_POSITION) == 0:
        put(here, CLOCK, field(here, CLOCK) + 1)
        if field(here, _POLICY) == DECAY:
            for slot in range(field(here, STORE_N_SLOTS)):
                put_real(slot_at(here, slot), _SCORE, real(slot_at(here, slot), _SCORE) * _SCORE_KEEP)
    put(record, _VISITED, field(here, CLOCK))
    offsets, n_experts, heats = field(args, _A_OFFSETS), field(args, _A_N_EXPERTS), field(field(args, _A_TOWER0), _TOWER_HEATS)
    put_real(record, _CHANCE, float(index(offsets, n_experts)) / float(tokens) / float(n_experts))
    if each == 1.0 and real(record, _TOKENS + 2) >= _LEARN_AFTER:
        _learn(args, record, heats)
    for i in range(HEATS):
        keep = _LAST if i == 0 else _QUICK if i == 1 else _SLOW
        fade = keep if each == 1.0 else keep**each
        gain = (1.0 - fade) / (1.0 - keep)
        put_real(record, _TOKENS + i, real(record, _TOKENS + i) * fade + gain)
        for e in range(n_experts):
            share = float(index(offsets, e + 1) - index(offsets, e)) / float(tokens)
            put_real(heats, e * HEATS + i, real(heats, e * HEATS + i) * fade + gain * share)


@jit.inner
def _lacking(args, e):  # type: ignore[no-untyped-def]
    """How many of an expert's slices are in no slot."""
    missing = 0
    for t in range(field(args, _A_N_TOWERS)):
        if index(field(field(args, _A_TOWER0 + t), _TOWER_SLOT_OF), e) < 0:
            missing += 1
    return missing


@jit.inner
def _begin(args, visit):  # type: ignore[no-untyped-def]
    """List the chosen experts: those that are wholly there first, so that no later wave finds them evicted."""
    offsets, todo, n = field(args, _A_OFFSETS), field(visit, _TODO), 0
    for wholly in range(2):
        for e in range(field(args, _A_N_EXPERTS)):
            if index(offsets, e + 1) > index(offsets, e) and (_lacking(args, e) == 0) == (wholly == 0):
                set_index(todo, n, e)
                n += 1
    put(visit, _N_TODO, n)


@jit.inner
def _watch(args, t, e, address, state):  # type: ignore[no-untyped-def]
    places = field(args, _A_PLACES0 + t) + 16 * e
    put(places, 0, address)
    put(places, 1, state)


@jit.inner
def _use(here, args, t, e, slot):  # type: ignore[no-untyped-def]
    """Let tower t's expert be found in a slot that holds, or will hold, its slice."""
    tower, record = field(args, _A_TOWER0 + t), slot_at(here, slot)
    age = field(here, AGE) + 1
    put(here, AGE, age)
    put(record, _AGE, age)
    in_page = (field(tower, TOWER_OFFSET) + e * field(tower, TOWER_SLICE_BYTES)) & (ALIGNMENT - 1)
    _watch(args, t, e, field(here, STORE_ARENA) + slot * field(here, STORE_CELL_BYTES) + in_page, record + 8 * SLOT_STATE)


@jit.inner
def _use_mapping(here, args, visit, t, e):  # type: ignore[no-untyped-def]
    """No slot is left: read in place, if the file still reaches that far (a page beyond its end would end the process)."""
    tower = field(args, _A_TOWER0 + t)
    n_bytes = field(tower, TOWER_SLICE_BYTES)
    first, address = field(tower, TOWER_OFFSET) + e * n_bytes, field(args, _A_MAPPED0 + t) + e * n_bytes
    count(here, _MISSES_COUNTED, 1)
    count(here, _EXHAUSTED, 1)
    _watch(args, t, e, address, here + 8 * READY_CELL)
    if libc.file_size(field(field(tower, TOWER_FILE), FILE_FD)) < first + n_bytes:
        put(visit, VISIT_FAILED, ENDED)
        put(visit, VISIT_FAILED_TOWER, tower)
        put(visit, VISIT_FAILED_EXPERT, e)
        return
    page = address & -libc.PAGE
    if libc.madvise(page, address + n_bytes - page, libc.MADV_WILLNEED) == 0:
        count(here, _ADVISED, 1)


@jit.inner
def _take_in(here, args, visit, e, n_missing):  # type: ignore[no-untyped-def]
    """Protect what is there of expert e and note what is not; how many are noted then."""
    for t in range(field(args, _A_N_TOWERS)):
        slot = index(field(field(args, _A_TOWER0 + t), _TOWER_SLOT_OF), e)
        if slot >= 0:
            _pin(here, visit, slot)
            _use(here, args, t, e, slot)
            record = slot_at(here, slot)
            put_real(record, _SCORE, real(record, _SCORE) + 1.0)
            count(here, _HITS, 1)
    for t in range(field(args, _A_N_TOWERS)):  # only now is it known how many slots are left
        if index(field(field(args, _A_TOWER0 + t), _TOWER_SLOT_OF), e) >= 0:
            continue
        if n_missing < field(here, N_UNPINNED):
            put(field(here, _MISSES), 2 * n_missing, t)
            put(field(here, _MISSES), 2 * n_missing + 1, e)
            n_missing += 1
        else:
            _use_mapping(here, args, visit, t, e)
    return n_missing


@jit.inner
def _own_unpinned(here, args, e):  # type: ignore[no-untyped-def]
    """How many of expert e's slices stand in slots that nobody protects yet."""
    n = 0
    for t in range(field(args, _A_N_TOWERS)):
        slot = index(field(field(args, _A_TOWER0 + t), _TOWER_SLOT_OF), e)
        if slot >= 0 and field(slot_at(here, slot), SLOT_PINS) == 0:
            n += 1
    return n


@jit.inner
def _next_wave(here, args, visit):  # type: ignore[no-untyped-def]
    """As many of the experts to do as fit together, at least one; how many slices they lack."""
    todo, n_todo, n_wave, n_missing = field(visit, _TODO), field(visit, _N_TODO), 0, 0
    most = field(here, STORE_N_SLOTS)
    if field(field(args, _A_TOKENS), 0) > field(field(args, _A_SEQS), 0):
        most = max(most // _PROMPT_SHARE, _PROMPT_EXPERTS * field(args, _A_N_TOWERS))
    while n_wave < n_todo:
        e = index(todo, n_wave)
        # The noted slices will take unprotected slots, and so will what this expert lacks; what it has must not be among the victims.
        if n_wave > 0 and n_missing + _lacking(args, e) > min(most, field(here, N_UNPINNED) - _own_unpinned(here, args, e)):
            break
        n_missing = _take_in(here, args, visit, e, n_missing)
        set_index(field(visit, VISIT_WAVE), n_wave, e)
        n_wave += 1
    for i in range(n_wave, n_todo):
        set_index(todo, i - n_wave, index(todo, i))
    put(visit, _N_TODO, n_todo - n_wave)
    put(visit, VISIT_N_WAVE, n_wave)
    return n_missing


@jit.inner
def _post(here, args, visit, layer, n_missing):  # type: ignore[no-untyped-def]
    """Give every noted slice a slot and post its read: of the tower that is computed last after all others."""
    if field(here, N_FREE) < n_missing:
        _evict(here, layer, n_missing - field(here, N_FREE))
    last = field(args, _A_N_TOWERS) - 1
    for late in range(2):
        for i in range(n_missing):
            t, e = field(field(here, _MISSES), 2 * i), field(field(here, _MISSES), 2 * i + 1)
            if (t == last) != (late == 1):
                continue
            n_free = field(here, N_FREE) - 1
            put(here, N_FREE, n_free)
            slot = index(field(here, _FREE), n_free)
            record, tower = slot_at(here, slot), field(args, _A_TOWER0 + t)
            put(record, SLOT_TOWER, tower)
            put(record, SLOT_EXPERT, e)
            put(record, _LAYER, layer)
            put(record, _HEAT, field(tower, _TOWER_HEATS) + e * (8 * HEATS))
            put_real(record, _SCORE, 1.0)
            simd.atomic_store(record + 8 * SLOT_STATE, FILLING)
            set_index(field(tower, _TOWER_SLOT_OF), e, slot)
            _pin(here, visit, slot)
            _use(here, args, t, e, slot)
            job = field(here, POSTED)
            set_index(field(here, STORE_RING), job % field(here, STORE_N_SLOTS), slot)
            put(here, POSTED, job + 1)
    count(here, _MISSES_COUNTED, n_missing)
    count(here, _FILLS, n_missing)


@jit.helper
def _visit(here, args, visit):  # type: ignore[no-untyped-def]
    """Protect the next wave and post what it lacks; how many reads that are, for the caller to wake lanes for when the lock is open
    again."""
    n_missing = _next_wave(here, args, visit)
    _post(here, args, visit, field(field(args, _A_TOWER0), _TOWER_LAYER), n_missing)
    put(visit, VISIT_AGAIN, 1 if field(visit, _N_TODO) > 0 else 0)
    if field(visit, VISIT_FAILED) != 0:  # this step is lost: nothing more is computed, or read, for it
        put(visit, _N_TODO, 0)
        put(visit, VISIT_AGAIN, 0)
        put(visit, VISIT_N_WAVE, 0)
    return n_missing


@jit.op
def acquire_slices(args, tid, nth):  # type: ignore[no-untyped-def]  # noqa: ARG001 - every op takes both
    """Find or fetch the slices of this layer's chosen experts, as many as fit; thread 0 does it. What the visit held before is let go."""
    if tid != 0:
        return
    here, visit = field(args, _A_STORE), field(args, _A_VISIT)
    _lock(here)
    _release(here, visit)
    put(visit, _N_TODO, 0)
    if field(visit, VISIT_FAILED) == 0 and index(field(args, _A_OFFSETS), field(args, _A_N_EXPERTS)) > 0:
        _remember(here, args, field(field(args, _A_TOWER0), _TOWER_LAYER))
        _begin(args, visit)
    n_missing = _visit(here, args, visit)
    put(visit, _FRESH, 1)
    _unlock(here)
    for _ in range(n_missing):
        libc.sem_post(here + 8 * SEMAPHORE)


@jit.op
def acquire_more(args, tid, nth):  # type: ignore[no-untyped-def]  # noqa: ARG001 - every op takes both
    """The head of the loop over waves: nothing at first, for the first wave was acquired already; then wave after wave."""
    if tid != 0:
        return
    here, visit = field(args, _A_STORE), field(args, _A_VISIT)
    if field(visit, _FRESH) != 0:
        put(visit, _FRESH, 0)
        return
    _lock(here)
    _release(here, visit)
    n_missing = _visit(here, args, visit) if field(visit, VISIT_FAILED) == 0 else 0
    if field(visit, VISIT_FAILED) != 0:
        put(visit, _N_TODO, 0)
        put(visit, VISIT_AGAIN, 0)
        put(visit, VISIT_N_WAVE, 0)
    _unlock(here)
    for _ in range(n_missing):
        libc.sem_post(here + 8 * SEMAPHORE)


@jit.op
def release_slices(args, tid, nth):  # type: ignore[no-untyped-def]  # noqa: ARG001 - every op takes both
    """The end of a step: let go of what the last layer used. `args` is any layer's record of the visit."""
    if tid == 0:
        here, visit = field(args, _A_STORE), field(args, _A_VISIT)
        _lock(here)
        _release(here, visit)
        _unlock(here)


@jit.function(1)
def open_store(here):  # type: ignore[no-untyped-def]
    """Make a zeroed record whose fields were filled in ready: all slots free, as the stack has them."""
    n = field(here, STORE_N_SLOTS)
    put(here, N_FREE, n)
    put(here, N_UNPINNED, n)
    put(here, READY_CELL, READY)
    libc.sem_init(here + 8 * SEMAPHORE, 0)


@jit.function(2)
def drop_tower(here, tower):  # type: ignore[no-untyped-def]
    """Empty every slot of a tower that no visit uses any more."""
    _lock(here)
    for slot in range(field(here, STORE_N_SLOTS)):
        if field(slot_at(here, slot), SLOT_TOWER) == tower:
            _empty(here, slot)
    _unlock(here)


# ---- for those who compute


_SPINS = 200  # some microseconds, of the some hundred that a read takes
_YIELDS = 4000  # a millisecond or two where nobody else wants the core
_LONG_YIELD_NS = 1_500_000  # somebody did; our own lanes take less
_CROWDED_NS = 200_000_000
_LONGEST_SLEEP_US = 1000  # should a wake-up ever be missed


@jit.inner
def ended_reads(ended):  # type: ignore[no-untyped-def]
    """How many reads have ended; `ended` is the address of that word of the store. Ask before looking at states, and wait by the answer."""
    return simd.atomic_load(ended)


@jit.inner
def wait_for_read(ended, seen, turn):  # type: ignore[no-untyped-def]
    """Turn number `turn` of waiting until more than `seen` reads have ended.

    A yielding thread keeps the core awake, so that reads end and are seen at once; but where others compute, each yield gives them
    milliseconds. So yield while that comes back soon, and sleep for a while after it did not.
    """
    if turn < _SPINS:
        simd.pause()
        return
    crowded = ended + 8 * (CROWDED_UNTIL - ENDED_READS)
    before = libc.nanoseconds()
    if turn < _SPINS + _YIELDS and before >= simd.atomic_load(crowded):
        simd.sched_yield()
        after = libc.nanoseconds()
        if after - before > _LONG_YIELD_NS:
            simd.atomic_store(crowded, after + _CROWDED_NS)
        return
    waiters = ended + 8 * (WAITERS - ENDED_READS)
    simd.atomic_add(waiters, 1)
    libc.wait_while(ended, seen, _LONGEST_SLEEP_US)
    simd.atomic_add(waiters, -1)


@jit.inner
def end_read(here, slot, state):  # type: ignore[no-untyped-def]
    """A lane's last word on a slot."""
    simd.atomic_store(slot_at(here, slot) + 8 * SLOT_STATE, state)
    simd.atomic_add(here + 8 * ENDED_READS, 1)
    if simd.atomic_load(here + 8 * WAITERS) != 0:
        libc.wake_all(here + 8 * ENDED_READS)


@jit.inner
def place_of(places, e):  # type: ignore[no-untyped-def]
    """Where an expert's slice is; good while the visit protects it."""
    return field(places, 2 * e)


@jit.inner
def state_of(places, e):  # type: ignore[no-untyped-def]
    """What is known about an expert's slice: FILLING, READY, or below 0 why it never will be."""
    return simd.atomic_load(field(places, 2 * e + 1))
