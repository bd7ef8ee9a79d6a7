"""The Python door: load a model, generate, close.

Owns: the order in which an engine is built and refused, and the `LLM` object over it. Must not know how anything below computes; every
error that leaves here is a VllmError. Heavy imports (numba and the kernels) wait until a file has been opened, so that a mistake in an
argument is named in milliseconds and `import vllm_cpp` stays cheap.

The order is the C API's: documents and enums (InvalidArgumentError), then the device, then the path, then what the file turns out to hold
(ModelLoadError), and weights last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import os
import queue
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_cpp import log
from vllm_cpp.config import engine as engine_config
from vllm_cpp.config import fields, offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.sampling import FIELD_NAMES, SamplingParams
from vllm_cpp.errors import GenerationError, InternalError, InvalidArgumentError, ModelLoadError, VllmError
from vllm_cpp.residency import devices
from vllm_cpp.residency import statistics as _registers_its_exit_handler  # noqa: F401 - before core does, and so runs after it

if TYPE_CHECKING:
    import numpy as np

    from vllm_cpp.core import Engine
    from vllm_cpp.gguf_file import GGUFModel
    from vllm_cpp.models.registry import Family
    from vllm_cpp.request import Completion, Request
    from vllm_cpp.residency.plan import Plan
    from vllm_cpp.residency.weight_offloader import WeightOffloader

Progress = Callable[[str, float], None]
"""Called while loading, with what is being done and how far it is, 0 to 1."""

_PARAMETERS: Final = tuple(name for name in engine_config.FIELD_NAMES if name != "model_path")
_SIZES: Final = ("num_blocks", "max_num_seqs", "max_model_len", "kv_cache_memory_bytes")
_OPENING: Final = "opening the file"
_VOCABULARY: Final = "reading the vocabulary"
_SHOWN_MODELS: Final = 4
_POLL_S: Final = 0.02
_BUILDING: Final = "preparing the kernels"


def build_engine(params: EngineParams, progress: Progress | None = None) -> Engine:
    """The engine these parameters describe. Closing it closes the model's file as well."""
    report = _Report(progress)
    with _only_vllm_errors(params, report):
        return _build(params, report)


class _Report:
    """The caller's progress callback. What it raises is the caller's own, and passes every door as it is."""

    def __init__(self, progress: Progress | None) -> None:
        if progress is not None and not callable(progress):
            raise InvalidArgumentError(f"progress must be callable, not {fields.shown(progress)}")
        self._progress = progress
        self.raised: BaseException | None = None

    def __call__(self, what: str, fraction: float) -> None:
        if self._progress is None:
            return
        try:
            self._progress(what, fraction)
        except BaseException as error:
            self.raised = error
            raise


@contextlib.contextmanager
def _only_vllm_errors(params: EngineParams, report: _Report | None = None) -> Iterator[None]:
    try:
        yield
    except VllmError:
        raise
    except Exception as error:
        if report is not None and error is report.raised:
            raise
        raise _as_ours(params, error) from error


def _as_ours(params: EngineParams, error: Exception) -> VllmError:
    if isinstance(error, MemoryError):
        what = f": {error}" if str(error) else ""
        return ModelLoadError(f"{params.model_path}: not enough memory to load this model{what}")
    if isinstance(error, OSError):
        return ModelLoadError(f"{params.model_path}: {error}")
    # A mistake of ours, but no door may see anything but a VllmError.
    return InternalError(f"{params.model_path}: loading failed: {type(error).__name__}: {error}; please report it")


def _build(params: EngineParams, progress: Progress) -> Engine:
    document = offload.parse(params.offload_config)
    engine_config.refuse_what_is_not_built(params)
    device = engine_device(params)
    residency = offload.install(document)
    engine_config.warn_of_what_sizes_nothing(params)
    engine_config.warn_of_variables_without_effect()
    progress(_OPENING, 0.0)
    from vllm_cpp.gguf_file import open_model

    model = open_model(model_file(params.model_path))
    try:
        from vllm_cpp import core, models
        from vllm_cpp.tokenizer import ChatTemplate, Tokenizer, read_tokenizer_config

        family = models.find(model.architecture)
        offloader = _offloader(family, document, device)
        settled = _settled(model, family, residency, device)
        if settled.placement.on_cpu and residency.mmap:
            offload.say_mapped_placement()
        for line in settled.placement.lines:
            log.once(line, line)
        if settled.refusal is not None:
            raise ModelLoadError(settled.refusal)
        progress(_VOCABULARY, 0.0)
        config = None if params.tokenizer_config_path is None else read_tokenizer_config(params.tokenizer_config_path)
        tokenizer = Tokenizer.from_gguf(model, config)
        chat_template = ChatTemplate.from_gguf(model, config)
        residency = offload.decide(document, residency)
        progress(_BUILDING, 0.0)
        with _sizes_named(params, tokenizer.vocab_size):
            loaded = models.load(model, params, residency, progress)
        runner = _WithItsFile(loaded, model, residency, device)
    except BaseException:
        model.close()
        raise
    try:
        if offloader is not None:
            offloader.refuse_unconsulted(family.architecture)
        return core.Engine(runner, tokenizer, params, chat_template)
    except BaseException:
        runner.close()
        raise


@contextlib.contextmanager
def _sizes_named(params: EngineParams, vocab_size: int) -> Iterator[None]:
    """Too little memory for what the parameters size: say how much that is, and which they are."""
    try:
        yield
    except MemoryError as error:
        sizes = (f"{name}={getattr(params, name) or 'default'}" for name in _SIZES)
        logits = params.max_num_seqs * vocab_size * 4
        raise MemoryError(
            f"{error}; the logits of {params.max_num_seqs} sequences take {logits} bytes, and the KV cache and "
            f"the tables of a step are sized by {', '.join(sizes)}: lower them"
        ) from error


def engine_device(params: EngineParams) -> devices.Device:
    """The device that computes. One that is not here was refused before (`refuse_what_is_not_built`)."""
    return devices.find(params.device)


def _offloader(family: Family, document: offload.OffloadDocument, device: devices.Device) -> WeightOffloader | None:
    from vllm_cpp.residency.weight_offloader import offloader_for

    consults = family.consults_weight_offloader
    return offloader_for(document.weight_offload, architecture=family.architecture, consults=consults, device=device)


def _settled(model: GGUFModel, family: Family, residency: offload.Residency, device: devices.Device) -> Plan:
    from vllm_cpp.residency import plan

    return plan.make(model, residency, device, streams_experts=family.streams_experts, places_experts=family.places_experts)


def model_file(path: str) -> str:
    """The GGUF file a path means: itself, or the one model (a split one counts once) that a directory holds."""
    if not Path(path).is_dir():
        return path
    names = sorted(file.name for file in Path(path).glob("*.gguf") if not file.name.startswith("mmproj") and file.is_file())
    first_shards = [name for name in names if not _is_later_shard(name)]
    if not first_shards:
        raise ModelLoadError(f"{path}: the directory holds no .gguf file, and nothing else is read")
    if len(first_shards) > 1:
        shown = ", ".join(first_shards[:_SHOWN_MODELS]) + (" …" if len(first_shards) > _SHOWN_MODELS else "")
        raise ModelLoadError(f"{path}: the directory holds {len(first_shards)} models ({shown}); name one")
    return str(Path(path) / first_shards[0])


def _is_later_shard(name: str) -> bool:
    stem, _, total = name.removesuffix(".gguf").rpartition("-of-")
    number = stem.rpartition("-")[2]
    return total.isdigit() and number.isdigit() and int(number) > 1


class _WithItsFile:
    """A runner that owns the file it reads weights from, and can say where they live."""

    def __init__(self, runner: Any, model: GGUFModel, residency: offload.Residency, device: devices.Device) -> None:
        self._runner = runner
        self._model = model
        self.run = runner.run  # each step asks for it
        sizes: Counter[str] = Counter()
        for tensor in model.tensors.values():
            sizes[tensor.encoding.name] += tensor.n_bytes
        self._about = {
            "architecture": model.architecture,
            "encoding_bytes": dict(sizes.most_common()),
            "device": device.name,
            "weights": "expanded to float32" if residency.expand else "in the file's mapping" if residency.mmap else "in memory",
            "max_model_len": runner.max_model_len,
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def stats(self) -> dict[str, Any]:
        below = getattr(self._runner, "stats", dict)()
        return {**self._about, **({"weights": "experts in slots, the rest in memory"} if "expert_stream" in below else {}), **below}

    def close(self) -> None:
        try:
            self._runner.close()
        finally:
            self._model.close()


def _desugared(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `load` with the shorthands for the offload document written into it."""
    short = {name: given[name] for name in offload.SHORTHANDS if name in given}
    rest = {name: value for name, value in given.items() if name not in short}
    return {**rest, "offload_config": offload.desugar(given.get("offload_config"), short)}  # type: ignore[dict-item]


def plan(
    path: str | os.PathLike[str],
    *,
    offload_config: str | dict[str, Any] | None = None,
    device: str = "auto",
    measure: bool = False,
    **more: Any,
) -> Plan:
    """What `load` with the same arguments would do with the weights of this file: where each lives, and whether they can be served.

    Refuses what `load` refuses before it reads weights, but for weights that do not fit, which is the plan's `refusal`. Nothing is loaded,
    and nothing of this process changes. `measure` takes a second at most to time drive and memory, for the plan's `forecast` of streaming.
    """
    fields.refuse_unknown("plan", more, (*_PARAMETERS, *offload.SHORTHANDS))
    given = {name: value for name, value in more.items() if value is not None}
    given = _desugared({**given, "offload_config": offload_config})
    params = EngineParams(model_path=fields.path_text("plan", path), device=device, **given)
    with _only_vllm_errors(params):
        document = offload.parse(params.offload_config)
        engine_config.refuse_what_is_not_built(params)
        residency, where = offload.preview(document), engine_device(params)
        from vllm_cpp.gguf_file import open_model

        with open_model(model_file(params.model_path)) as model:
            from vllm_cpp import models

            family = models.find(model.architecture)
            _offloader(family, document, where)
            found = _settled(model, family, residency, where)
            return _with_forecast(found, model, params) if measure else found


def _with_forecast(plan: Plan, model: GGUFModel, params: EngineParams) -> Plan:
    from vllm_cpp import models
    from vllm_cpp.residency import forecast

    kv_bytes = models.kv_cache_bytes(model, params, plan.residency)
    state_bytes = models.state_bytes(model, params, plan.residency) if plan.towers else 0
    made = forecast.make(plan, model, kv_bytes=kv_bytes, state_bytes=state_bytes, threads=params.num_threads)
    return dataclasses.replace(plan, forecast=made)


def load(
    path: str | os.PathLike[str],
    *,
    offload_config: str | dict[str, Any] | None = None,
    device: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    **more: Any,
) -> LLM:
    """Load a GGUF file (any shard of a split one, or the directory of one) and answer with an `LLM`; use it in a `with` statement.

    `offload_config` is the offload document, as JSON text or a dict. cpu_moe, n_cpu_moe, override_tensor, fit, mmap and expert_stream
    (True, or a number of slots) are shorthands for keys of it. `progress(what, fraction)` is called while loading. The other parameters are
    those of `EngineParams`, by their names.
    """
    given = {"offload_config": offload_config, "device": device, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    return LLM(path, progress=progress, threads=threads, **given, **more)


class LLM:
    """A loaded model. Its methods may be called from several threads at once; requests are computed together."""

    def __init__(self, path: str | os.PathLike[str], *, progress: Progress | None = None, **parameters: Any) -> None:
        fields.refuse_unknown("load", parameters, (*_PARAMETERS, *offload.SHORTHANDS))
        given = {name: value for name, value in parameters.items() if value is not None}
        # Nobody who leaves this out states a fraction, so nobody is warned that it sizes nothing.
        given.setdefault("gpu_memory_utilization", 0.0)
        params = EngineParams(model_path=fields.path_text("load", path), **_desugared(given))
        self._engine: Engine | None = build_engine(params, progress)
        self._path = params.model_path

    # generating

    def generate(self, prompt: Any, sampling: SamplingParams | None = None, **keywords: Any) -> Any:
        """Complete a prompt, or each of a list of prompts together.

        A prompt is a text or a list of token ids. Sampling is given as `SamplingParams` or by its keywords, with vLLM's defaults: note
        max_tokens=16 and temperature=1.0, which samples; temperature=0 is greedy. Answers with a `Completion` (text, token_ids,
        finish_reason, prompt_tokens, completion_tokens, timings), or a list of them for a list.
        """
        engine, params = self._open(), _sampling("generate", sampling, keywords)
        prompts, many = _prompts(prompt)
        requests: list[Request] = []
        try:
            for one in prompts:
                requests.append(engine.submit(one, params))
            completions = [request.wait() for request in requests]
        except BaseException:  # one prompt was refused, or the user interrupts: nobody will ask for the others
            for request in requests:
                request.cancel()
            raise
        return completions if many else completions[0]

    def stream(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, **keywords: Any) -> Stream:
        """Complete one prompt and iterate over its text as it comes. Closing the iterator, or dropping it, ends the request."""
        engine, params = self._open(), _sampling("stream", sampling, keywords)
        return Stream(lambda on_delta: engine.submit(prompt, params, on_delta))

    def chat(self, messages: Sequence[dict[str, Any]], *, stream: bool = False, **request: Any) -> Any:
        """Answer a conversation: an OpenAI chat.completion object as a dict, or with stream=True an iterator of chat.completion.chunk.

        The keywords are those of OpenAI's request; the prompt is made by the model's own chat template.
        """
        from vllm_cpp.openai import chat

        stream = fields.boolean("stream", stream)
        engine, document = self._open(), {**request, "messages": list(messages) if isinstance(messages, tuple) else messages}
        return ChunkStream(lambda on_chunk: chat.submit(engine, document, on_chunk)) if stream else chat.complete(engine, document)

    def embed(self, texts: Any) -> np.ndarray:
        """The embeddings of a text, or of each of a list of texts, as float32 [number of texts, dim]: rows of length 1.

        A text may be given as its token ids. Only for models whose files say how hidden states are pooled; the others refuse, as these
        refuse to generate.
        """
        import numpy as np

        engine = self._open()
        given, many = _prompts(texts)
        if not given:
            raise InvalidArgumentError("embed takes at least one text")
        requests: list[Request] = []
        try:
            for index, text in enumerate(given):
                requests.append(engine.submit_embedding(text, f"texts[{index}]" if many else "text"))
            return np.stack([request.wait().values for request in requests])
        except BaseException:  # one text was refused, or the user interrupts: nobody will ask for the others
            for request in requests:
                request.cancel()
            raise

    # text and ids

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._open().tokenizer

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """The token ids of a text. `add_special` adds what the model wants around a prompt; `parse_special` reads special tokens in it."""
        if not isinstance(text, str):
            raise InvalidArgumentError(f"tokenize takes a string, not {fields.shown(text)}")
        fields.boolean("add_special", add_special)
        fields.boolean("parse_special", parse_special)
        return list(self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special))

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of token ids."""
        tokenizer = self.tokenizer
        given = enumerate(fields.items("token_ids", token_ids))
        ids = [fields.integer(f"token_ids[{i}]", token, 0, tokenizer.vocab_size - 1) for i, token in given]
        return str(tokenizer.decode(ids, skip_special=fields.boolean("skip_special", skip_special)))

    # the engine

    def stats(self) -> dict[str, Any]:
        """Counts since loading, and how full the engine is now. `expert_stream` is None unless this model's experts are streamed; then it
        has what the process's slot store counted, for all its engines."""
        stats = self._open().stats()
        return {**stats, "expert_stream": stats["runner"].pop("expert_stream", None)}

    def close(self) -> None:
        """End what runs and give everything back. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _open(self) -> Engine:
        if self._engine is None:
            raise GenerationError(f"{self._path}: this model was closed; load it again")
        return self._engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # getattr: __init__ may have refused its arguments. suppress: at interpreter exit the modules a close needs may be gone.
        if getattr(self, "_engine", None) is not None:
            with contextlib.suppress(Exception):
                self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return f"<vllm_cpp.LLM {self._path} closed>"
        about = self._engine.stats()["runner"]
        mix = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in about["encoding_bytes"].items())
        return (
            f"<vllm_cpp.LLM {self._path} {about['architecture']} ({mix}) on {about['device']}, weights {about['weights']}, "
            f"max_model_len={about['max_model_len']}>"
        )


class _Deliveries:
    """What a request delivers, as an iterator in the caller's thread.

    The engine holds the callback for as long as the request runs, so the callback holds the queue and not this object: one that is dropped
    is then gone at once, and ends its request.
    """

    _over = True  # until there is a request

    def __init__(self, submit: Callable[[Callable[..., bool]], Request]) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._request = submit(_into(self._queue))
        self._over = False

    def _end(self) -> None:
        self._over = True
        self._request.wait()  # raises what went wrong

    @property
    def completion(self) -> Completion:
        """What the request ended with; known once the iterator is used up or closed."""
        return self._request.wait()

    def close(self) -> None:
        """End the request if it still runs. Safe to call twice, or after the last item."""
        self._over = True
        self._request.cancel()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._over:
            self.close()


def _into(deliveries: queue.SimpleQueue[Any]) -> Callable[..., bool]:
    def put(*delivery: Any) -> bool:
        deliveries.put(delivery)
        return True

    return put


class Stream(_Deliveries, Iterator[str]):
    """The text of one completion, piece by piece; no piece splits a character. `completion` has the whole once it is over."""

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        while not self._over:
            self._request.refuse_endless_wait("stream")
            text, finished = self._queue.get()
            if finished:
                self._end()
            if text:
                return str(text)
        raise StopIteration


class ChunkStream(_Deliveries, Iterator[dict[str, Any]]):
    """The chunks of one chat answer."""

    def __iter__(self) -> ChunkStream:
        return self

    def __next__(self) -> dict[str, Any]:
        while not self._over:
            self._request.refuse_endless_wait("chat")
            # A failed request delivers no last chunk, so its end is seen on the request.
            if self._request.done and self._queue.empty():
                self._end()
                break
            with contextlib.suppress(queue.Empty):
                (chunk,) = self._queue.get(timeout=_POLL_S)
                return dict(chunk)
        raise StopIteration


def _sampling(function: str, sampling: SamplingParams | None, keywords: dict[str, Any]) -> SamplingParams:
    if sampling is None:
        fields.refuse_unknown(function, keywords, FIELD_NAMES)
        return SamplingParams(**keywords)
    if not isinstance(sampling, SamplingParams):
        raise InvalidArgumentError(f"{function} takes SamplingParams, not {fields.shown(sampling)}")
    if keywords:
        raise InvalidArgumentError(f"{function} takes SamplingParams or keywords, not both ({', '.join(keywords)})")
    return sampling


def _prompts(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts and whether there may be several. A list of numbers is one prompt of token ids."""
    if isinstance(prompt, list | tuple) and not (prompt and isinstance(prompt[0], numbers.Integral)):
        return list(prompt), True
    return [prompt], False
