"""vllm-cli from its arguments to its exit code.

Owns: the order of things (arguments, load, generate, report), signals, and which failure is which exit code. Must not know flags
(`arguments`) or how a conversation goes (`chat`).

Ctrl-C ends the program as an interrupt, after the model was closed; a reader that goes away (`| head`) ends it at the next write.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_cpp import log
from vllm_cpp.cli import arguments, output
from vllm_cpp.cli.arguments import PROGRAM, Options, UsageError
from vllm_cpp.cli.progress import Bar
from vllm_cpp.errors import InvalidArgumentError, VllmError

if TYPE_CHECKING:
    from vllm_cpp.api import LLM
    from vllm_cpp.config.sampling import SamplingParams
    from vllm_cpp.request import Completion

DONE, FAILED, WRONG_ARGUMENTS = 0, 1, 2
_DEFAULT_MAX_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code."""
    old = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except output.OutputError as error:
        log.line(f"{PROGRAM}: {error}")
        return FAILED
    except KeyboardInterrupt:
        # Die of the signal, so that the shell (and a script's loop) sees an interrupt and not a failure.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return FAILED
    finally:
        signal.signal(signal.SIGPIPE, old)


def _main(argv: Sequence[str]) -> int:
    try:
        options = arguments.parse(argv)
        if options.help:
            output.write(arguments.help_text() + "\n")
            return DONE
        if options.version:
            output.write(_version() + "\n")
            return DONE
        prompt = None if options.plan else _prompt(options)
        parameters, sampling = _checked(options, prompt is None)
    except UsageError as error:
        log.line(f"{PROGRAM}: {error}")
        log.line(arguments.USAGE)
        return WRONG_ARGUMENTS
    started = time.monotonic()
    try:
        if options.plan:
            from vllm_cpp.cli import plan

            return plan.show(options, _document(options), parameters)
        model = _load(options, parameters)
    except VllmError as error:
        log.line(f"{PROGRAM}: model load failed (status {error.status}): {error}")
        return FAILED
    with model:
        load_s = time.monotonic() - started
        if prompt is None:
            from vllm_cpp.cli import chat

            return chat.converse(model, sampling)
        return _complete(model, options, prompt, sampling, load_s)


def _prompt(options: Options) -> str | None:
    """The prompt, or None for a conversation."""
    if options.prompt is None:
        if not output.is_terminal():
            raise UsageError("--prompt <text> is required where standard input is no terminal (--prompt - reads the prompt from it)")
        if options.json or options.stream:
            raise UsageError("--prompt <text> is required with --json and --stream")
        return None
    data = output.read_all() if options.prompt == "-" else os.fsencode(options.prompt)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not valid UTF-8 (byte {error.start})") from None
    if not text:
        raise UsageError("the prompt is empty")
    return text


def _checked(options: Options, is_chat: bool) -> tuple[dict[str, Any], SamplingParams]:
    """Engine and sampling parameters, their ranges checked before anything is loaded.

    The offload document is not looked at here: a wrong one is a failed load with its status, as it is through every other door.
    """
    from vllm_cpp.config.engine import EngineParams
    from vllm_cpp.config.sampling import SamplingParams

    names = ("device", "max_num_seqs", "max_model_len", "kv_cache_dtype", "threads")
    parameters = {name: value for name in names if (value := getattr(options, name)) is not None}
    max_tokens = options.max_tokens
    if max_tokens is None and not is_chat:
        max_tokens = _DEFAULT_MAX_TOKENS
    try:
        EngineParams(model_path=str(options.model), **parameters)
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k, seed=options.seed
        )
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from None
    return parameters, sampling


def _load(options: Options, parameters: dict[str, Any]) -> LLM:
    log.line(f"{PROGRAM}: loading model from {options.model}")
    from vllm_cpp import api

    with Bar() as progress:
        return api.load(str(options.model), offload_config=_document(options), progress=progress, **parameters)


def _document(options: Options) -> Any:
    """The offload document with the flags that are parts of it."""
    from vllm_cpp.config.offload import shorthand

    given = {name: value for name in shorthand.SHORTHANDS if (value := getattr(options, name)) is not None}
    return shorthand.desugar(_document_text(options.offload_config), given, shorthand.FLAGS)


def _document_text(given: str | None) -> str | None:
    """JSON text, or the text of the file that @path names."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        raise InvalidArgumentError(
            f"--offload-config: {given[1:]}: no such file (behind @ stands a file's path, else the document itself)"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--offload-config: {given[1:]!r} cannot be read: {error}") from None


def _complete(model: LLM, options: Options, prompt: str, sampling: SamplingParams, load_s: float) -> int:
    write: Callable[[str], None] = output.write if options.stream else lambda _text: None
    try:
        with model.stream(prompt, sampling) as stream:
            for text in stream:
                write(text)
            completion = stream.completion
    except VllmError as error:
        if options.stream:
            output.write("\n")
        log.line(f"{PROGRAM}: completion failed (status {error.status}): {error}")
        return FAILED
    if options.json:
        output.write(json.dumps(_report(completion, load_s, model.stats()["expert_stream"]), ensure_ascii=False) + "\n")
    else:
        output.write("\n" if options.stream else completion.text + "\n")
    log.line(f"{PROGRAM}: {_summary(completion)}")
    return DONE


def _summary(completion: Completion) -> str:
    seconds = completion.timings.finished - completion.timings.submitted
    rate = completion.completion_tokens / seconds if seconds > 0 else 0.0
    return (
        f"finish_reason={completion.finish_reason} prompt_tokens={completion.prompt_tokens} "
        f"completion_tokens={completion.completion_tokens} secs={seconds:.3f} tok_s={rate:.3f}"
    )


def _report(completion: Completion, load_s: float, expert_stream: dict[str, Any] | None) -> dict[str, Any]:
    """The object of --json. A rate that nothing was measured for is null."""
    import resource

    times = completion.timings
    first = times.first_token
    decoded = completion.completion_tokens - 1
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
        "load_s": load_s,
        "ttft_s": None if first is None else first - times.submitted,
        "prefill_tok_s": None if first is None else _rate(completion.prompt_tokens, first - times.submitted),
        "decode_tok_s": None if first is None else _rate(decoded, times.finished - first),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "expert_stream": expert_stream,
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _version() -> str:
    """The library, its C ABI, what compiles its kernels, the device; without importing any of it."""
    from importlib import metadata

    from vllm_cpp import __version__

    compilers = []
    for name in ("numba", "llvmlite"):
        try:
            compilers.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            compilers.append(f"{name} missing")
    return f"{PROGRAM} {__version__} (C ABI 21, {', '.join(compilers)}, device cpu)"
