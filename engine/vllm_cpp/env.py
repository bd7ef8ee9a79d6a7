"""Every environment variable the library reads, one typed row each.

Owns: the names, their kinds, how a value is read and when it is ignored, and the one sentence of documentation for each. Must not know what
a value decides: rooms ask `get(name)` at the moment of the decision and apply `environment > document > default` themselves.

The value is asked of libc and not of `os.environ`: that is a copy made when Python started, and a C host may call `setenv` between two
engines. Python's own `os.environ[...] = …` reaches libc too, so this sees both.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import Final

MAX_CPU_LAYERS: Final = 4096
"""Upper bound of `placement.n_cpu_moe` and its variable: more layers than any model has, few enough that no list can explode."""

_OFF_WORDS: Final = frozenset({"", "0", "false", "off", "no"})
_MAX_DIGITS: Final = 18  # below 2**63 whatever the digits are


class Kind(enum.Enum):
    """How a value is read. A value that its kind cannot read is ignored, as if the variable were unset."""

    SWITCH = "switch: empty, 0, false, off and no (any case) are off, everything else is on"
    COUNT = "count: decimal digits, more than 0"
    BYTES = "bytes: decimal digits, 0 is legal"
    LAYERS = f"layers: decimal digits, 0 to {MAX_CPU_LAYERS}"
    TEXT = "text: any non-empty value"


@dataclass(frozen=True)
class Row:
    """One variable: `default` is prose, because some defaults depend on the model or the machine. One that `acts` is False for is known
    by name, for what sets it elsewhere, and changes nothing here."""

    name: str
    kind: Kind
    default: str
    doc: str
    acts: bool = True


_ROWS: Final = (
    Row("VT_GGUF_MMAP", Kind.SWITCH, "on", "use weights in place from the file's mapping (mmap.enabled); off copies them into memory"),
    Row("VT_GGUF_PREFAULT", Kind.SWITCH, "on while the borrowed bytes fit in memory", "read the mapping in while loading (mmap.prefault)"),
    Row("VT_GGUF_KEEP_QUANT", Kind.SWITCH, "on", "keep quantized weights as the file stores them; off expands them to float32"),
    Row("VT_MOE_EXPERT_STREAM", Kind.SWITCH, "off", "keep routed experts on disk and page slices into an arena (expert_stream.enabled)"),
    Row("VT_MOE_EXPERT_STREAM_SLOTS", Kind.COUNT, "64", "slots of that arena (expert_stream.slots)"),
    Row("VT_MOE_EXPERT_STREAM_SLOT_BYTES", Kind.COUNT, "the largest slice of the file", "bytes of one slot (expert_stream.slot_bytes)"),
    Row("VT_MOE_EXPERT_STREAM_STATS_EVERY", Kind.BYTES, "16", "steps between two statistics lines; 0 keeps only the last line"),
    Row("VT_MOE_EXPERT_STREAM_LANES", Kind.COUNT, "measured when the arena is built", "threads that read slices into it"),
    Row("VT_MOE_EXPERT_STREAM_DIRECT", Kind.SWITCH, "on while the experts exceed memory", "read slices past the page cache"),
    Row("VT_MOE_EXPERT_STREAM_POLICY", Kind.TEXT, "next", "which slot is reused: next, or for comparison lru or decay"),
    Row("VT_DEVICE_WEIGHT_BUDGET_BYTES", Kind.BYTES, "the device's memory", "bytes a device may stage (device_fit.weight_budget_bytes)"),
    Row("VT_CPU_MOE", Kind.SWITCH, "off", "compute every routed expert on the CPU (placement.cpu_moe)"),
    Row("VT_N_CPU_MOE", Kind.LAYERS, "unset", "compute the routed experts of the first N layers on the CPU (placement.n_cpu_moe)"),
    Row("VT_PLACEMENT_OVERRIDES", Kind.TEXT, "none", "pattern=device,… (placement.overrides)"),
    Row("VT_PLACEMENT_FIT", Kind.SWITCH, "off", "place whole layers on the CPU until the rest fits the budget (placement.fit)"),
    Row("VT_QWEN35_ALIAS_HOST_WEIGHTS", Kind.SWITCH, "on", "nothing here: an integrated device would read host weights so", acts=False),
    Row("VT_ENABLE_JUMP_FORWARD", Kind.SWITCH, "off", "jump-forward decoding of structured output; wins over the parameter"),
    Row("VT_CPU_REF", Kind.SWITCH, "off", "the reference lane: all weights and the KV cache in float32, activations never rounded"),
    Row("VLLM_CPP_CPU_THREADS", Kind.COUNT, "physical cores this process may use", "worker threads of an engine"),
    Row("VLLM_CPP_CACHE_DIR", Kind.TEXT, "vllm_cpp in the user's cache directory", "where kernels are kept; read as each is first used"),
    Row("XDG_CACHE_HOME", Kind.TEXT, ".cache in the home directory", "the user's cache directory"),
    Row("HOME", Kind.TEXT, "what the system has for the user", "the user's home directory"),
)
ROWS: Final[dict[str, Row]] = {row.name: row for row in _ROWS}

# PyDLL keeps the interpreter lock during the call, so no Python thread changes the environment underneath it.
_getenv = ctypes.PyDLL(None).getenv
_getenv.restype = ctypes.c_char_p
_getenv.argtypes = [ctypes.c_char_p]


def _digits(text: str) -> int | None:
    """The number, or None for a sign, a space, a letter, a digit that is not ASCII, or more digits than any size has."""
    if not (text.isascii() and text.isdigit()) or len(text.lstrip("0")) > _MAX_DIGITS:
        return None
    return int(text)


def _read(kind: Kind, text: str) -> bool | int | str | None:
    if kind is Kind.SWITCH:
        return text.lower() not in _OFF_WORDS
    if kind is Kind.TEXT:
        return text or None
    number = _digits(text)
    if number is None or (kind is Kind.COUNT and number == 0) or (kind is Kind.LAYERS and number > MAX_CPU_LAYERS):
        return None
    return number


def raw(name: str) -> str | None:
    """The variable's text, or None when unset. `name` must be one of `ROWS`."""
    value = _getenv(ROWS[name].name.encode("ascii"))
    return None if value is None else value.decode("utf-8", "surrogateescape")


def get(name: str) -> bool | int | str | None:
    """The typed value of one of `ROWS`, or None when the variable is unset or its value is ignored."""
    text = raw(name)
    return None if text is None else _read(ROWS[name].kind, text)


def switch(name: str) -> bool | None:
    """`get` of a switch, typed."""
    value = get(name)
    return None if value is None else bool(value)


def number(name: str) -> int | None:
    """`get` of a count, typed."""
    value = get(name)
    return value if isinstance(value, int) else None


def text(name: str) -> str | None:
    """`get` of a text, typed."""
    value = get(name)
    return value if isinstance(value, str) else None
