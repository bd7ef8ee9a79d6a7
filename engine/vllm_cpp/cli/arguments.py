"""The command line of vllm-cli.

Owns: every flag, its alias, its kind and its help, and the exact texts of usage errors, which scripts match; that is why argparse, whose
texts change between Python versions, does not do it. Must not know what a flag does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_cpp.config.offload.shorthand import SHORTHANDS

PROGRAM: Final = "vllm-cli"


class UsageError(Exception):
    """The command line is wrong; the text says how."""


@dataclass
class Options:
    """What the command line said. None is "not said"."""

    model: str | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stream: bool = False
    offload_config: str | None = None
    cpu_moe: bool | None = None
    n_cpu_moe: int | None = None
    override_tensor: list[str] | None = None
    fit: bool | None = None
    mmap: bool | None = None
    expert_stream: bool | int | None = None
    plan: bool = False
    device: str = "auto"
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    kv_cache_dtype: str | None = None
    threads: int | None = None
    json: bool = False
    help: bool = False
    version: bool = False


def _integer(text: str) -> int:
    return int(text, 10)


def _override(text: str) -> str:
    if "=" not in text:
        raise ValueError(text)
    return text


_KINDS: Final[dict[Callable[[str], Any], str]] = {_integer: "an integer", float: "a number", _override: "PATTERN=DEVICE"}


@dataclass(frozen=True)
class _Flag:
    names: tuple[str, ...]
    field: str
    read: Callable[[str], Any] | None  # None: a switch
    value: str
    help: str
    alone: Any = None  # what a switch sets, and a flag whose value may be left out
    repeats: bool = False

    @property
    def may_stand_alone(self) -> bool:
        return self.alone is not None


def _shorthand(keyword: str, read: Callable[[str], Any] | None, *aliases: str, alone: Any = None, repeats: bool = False) -> _Flag:
    row = SHORTHANDS[keyword]
    return _Flag((row.flag, *aliases), keyword, read, row.value, row.doc, alone, repeats)


_FLAGS: Final = (
    _Flag(("--model", "-m"), "model", str, "PATH", "the model: a GGUF file (any shard of a split one) or its directory"),
    _Flag(("--prompt", "-p"), "prompt", str, "TEXT", "the prompt; - reads it from standard input; without one, on a terminal: a chat"),
    _Flag(("--max-tokens", "-n"), "max_tokens", _integer, "N", "stop after N tokens (16; in a chat no limit); 0 is no limit"),
    _Flag(("--temperature", "--temp"), "temperature", float, "T", "0 takes the likeliest token (0)"),
    _Flag(("--top-p",), "top_p", float, "P", "sample from the likeliest tokens that make up P (1)"),
    _Flag(("--top-k",), "top_k", _integer, "K", "sample from the K likeliest tokens; 0 is all (0)"),
    _Flag(("--seed", "-s"), "seed", _integer, "S", "repeat a sampled answer"),
    _Flag(("--stream",), "stream", None, "", "print the answer as it comes", True),
    _Flag(("--json",), "json", None, "", "print one JSON object: the text, its tokens, counts, times and memory; or the plan", True),
    _Flag(("--offload-config",), "offload_config", str, "JSON", "where weights live and what computes them, or @FILE with it"),
    _shorthand("cpu_moe", None, alone=True),
    _shorthand("n_cpu_moe", _integer),
    _shorthand("override_tensor", _override, "-ot", repeats=True),
    _shorthand("fit", None, alone=True),
    _shorthand("mmap", None, alone=False),
    _shorthand("expert_stream", _integer, alone=True),
    _Flag(("--plan",), "plan", None, "", "print what lives where, in bytes, and leave", True),
    _Flag(("--device",), "device", str, "NAME", "auto, cpu or cuda (auto)"),
    _Flag(("--max-num-seqs",), "max_num_seqs", _integer, "N", "requests computed together (32)"),
    _Flag(("--max-model-len", "-c"), "max_model_len", _integer, "N", "longest prompt and answer, in tokens (the model's)"),
    _Flag(("--kv-cache-dtype",), "kv_cache_dtype", str, "NAME", "f16, q8_0 (half the memory) or f32 for keys and values (f16)"),
    _Flag(("--threads", "-t"), "threads", _integer, "N", "worker threads (VLLM_CPP_CPU_THREADS, else the physical cores)"),
    _Flag(("--version",), "version", None, "", "print versions and leave", True),
    _Flag(("--help", "-h"), "help", None, "", "print this and leave", True),
)
_BY_NAME: Final = {name: flag for flag in _FLAGS for name in flag.names}

USAGE: Final = f"usage: {PROGRAM} --model PATH --prompt TEXT [--max-tokens N] [--stream] …   ({PROGRAM} --help lists all)"


def help_text() -> str:
    """What --help prints."""
    left = [", ".join(flag.names) + (f" {flag.value}" if flag.value else "") for flag in _FLAGS]
    width = max(len(text) for text in left)
    lines = [f"  {text:<{width}}  {flag.help}" for text, flag in zip(left, _FLAGS, strict=True)]
    return "\n".join(
        [
            USAGE,
            "",
            *lines,
            "",
            "The answer goes to standard output, everything else to standard error. Exit status: 0 done, 1 the model could not be",
            "loaded or generation failed, 2 wrong arguments. An environment variable (VT_…) wins over the offload document,",
            "of which --cpu-moe to --expert-stream are parts.",
        ]
    )


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; UsageError for the first thing wrong in it. `--flag value` and `--flag=value` are the same."""
    options = Options()
    rest = list(arguments)
    alone = ""  # the flag before, where it took no number and could have
    while rest:
        given, before, alone = rest.pop(0), alone, ""
        name, equals, value = given.partition("=") if given.startswith("--") else (given, "", "")
        flag = _BY_NAME.get(name)
        if flag is None or (flag.read is None and equals):
            meant_as_value = before and (not given.startswith("-") or given[1:].isdecimal())
            way_out = f": behind {before} stands a whole number, or nothing" if meant_as_value else ""
            raise UsageError(f"unknown argument '{given}'{way_out}")
        if flag.read is None or (flag.may_stand_alone and not equals and not (rest and rest[0].isdecimal())):
            setattr(options, flag.field, flag.alone)
            alone = name if flag.read is not None else ""
            continue
        if not equals:
            if not rest:
                raise UsageError(f"missing value for '{given}'")
            value = rest.pop(0)
        try:
            read = flag.read(value)
        except ValueError:
            raise UsageError(f"'{value}' is not {_KINDS[flag.read]} ({name})") from None
        setattr(options, flag.field, [*(getattr(options, flag.field) or ()), read] if flag.repeats else read)
    if not (options.help or options.version):
        _check(options)
    return options


def _check(options: Options) -> None:
    if not options.model:
        raise UsageError("--model <path> is required")
    if options.plan and (options.prompt is not None or options.stream):
        raise UsageError("--plan loads nothing: leave --prompt and --stream out")
    if options.json and options.stream:
        raise UsageError("--json prints one object when the answer is complete, and --stream prints it as it comes: give one of them")
