"""The one document this process has been told, and what can no longer change.

Owns: the installed request (merged field by field, so an absent field leaves what was said), the two decisions that freeze once a model
used them, and the start-up lines. Must not know how a document is written or a residency carried out.

All state is behind one lock, and `install` answers with the residency in force under it, so two engines built at once cannot mix.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from dataclasses import dataclass

from vllm_cpp import log
from vllm_cpp.errors import ModelLoadError

from .document import OffloadDocument, ResidencyRequest
from .resolve import Residency, from_environment, overridden, resolved


@dataclass
class _State:
    request: ResidencyRequest
    expert_stream: bool | None = None
    geometry: tuple[int, int] | None = None  # slots, bytes of a slot
    store_process: int | None = None  # the process in which the slot store was built


_lock = threading.RLock()
_state = _State(ResidencyRequest())


def install(document: OffloadDocument) -> Residency:
    """Merge a document into the process and return what is in force. A document that is refused changes nothing."""
    with _lock:
        residency = preview(document)
        _state.request = document.residency.over(_state.request)
        _say(document)
        return residency


def preview(document: OffloadDocument) -> Residency:
    """What `install` would answer with, and the same refusals; nothing is changed or said."""
    with _lock:
        _refuse_frozen(document.residency)
        return _with_decisions(resolved(document.residency.over(_state.request)))


def resolve() -> Residency:
    """What is in force now."""
    with _lock:
        return _with_decisions(resolved(_state.request))


def decide(document: OffloadDocument, residency: Residency) -> Residency:
    """A model is about to use what `install` answered for its document; the first one decides for the process whether experts are streamed.

    Where another model, loaded meanwhile, decided otherwise, a document that asked for this is refused, and one that did not goes along.
    """
    with _lock:
        if residency.expert_stream and _state.store_process not in (None, os.getpid()):
            raise ModelLoadError(
                "experts are streamed by threads of the process this one was forked from, and a forked child has none of them; fork before "
                "the first model that streams its experts is loaded, or exec"
            )
        freeze_expert_stream(residency.expert_stream)
        _refuse_frozen(document.residency)
        return _with_decisions(residency)


def freeze_expert_stream(on: bool) -> None:
    """Whether experts are streamed was used; the first use decides."""
    with _lock:
        if _state.expert_stream is None:
            _state.expert_stream = on


def freeze_geometry(slots: int, slot_bytes: int) -> None:
    """The slot store was built with this geometry; it cannot be resized."""
    with _lock:
        if _state.geometry is None:
            _state.geometry, _state.store_process = (slots, slot_bytes), os.getpid()


def reset() -> None:
    """Forget every document and decision. For tests: a process that serves cannot do this."""
    with _lock:
        _state.request, _state.expert_stream, _state.geometry, _state.store_process = ResidencyRequest(), None, None, None


def _decisions() -> dict[str, object]:
    """The frozen fields and the values in force."""
    taken: dict[str, object] = {}
    if _state.expert_stream is not None:
        taken["expert_stream"] = _state.expert_stream
    if _state.geometry is not None:
        taken["expert_stream_slots"], taken["expert_stream_slot_bytes"] = _state.geometry
    return taken


def _with_decisions(residency: Residency) -> Residency:
    return dataclasses.replace(residency, **_decisions())  # type: ignore[arg-type]


def _refuse_frozen(request: ResidencyRequest) -> None:
    said = request.said()
    for field, value in _decisions().items():
        if field not in said:
            continue
        winner = from_environment(field)  # a document that a variable overrules changes nothing, and is no change
        if (said[field] if winner is None else winner) != value:
            raise _frozen(field, value)


def _frozen(field: str, value: object) -> ModelLoadError:
    in_force = ResidencyRequest(**{field: value}).described()  # type: ignore[arg-type]
    return ModelLoadError(
        f"weight residency config: {field} cannot be changed once a model of this process used it (in force: {in_force}); "
        "leave the field out, ask for the same value, or load this model in a process of its own"
    )


def _say(document: OffloadDocument) -> None:
    warning = document.weight_offload.warning
    if warning is not None:
        _once(f"[vllm.cpp] offload_config: {warning}")
    described = document.residency.described()
    if described:
        _once(f"engine: weight residency (offload_config vllm_cpp): {described}")
    winners = overridden(document.residency)
    if winners:
        _once(f"engine: weight residency: the environment OVERRIDES the config for {', '.join(winners)}")


def say_mapped_placement() -> None:
    """Say that placed experts will be read through the mapping. What is placed is known only to the model's load: on an engine that is the
    CPU, or for a model without experts, a placement that was asked for places nothing."""
    _once(
        "engine: weight residency: a CPU placement is active while the weights are mmap-resident: the mapping is read in file order "
        "and experts in router order, so it works, slowly; where the weights fit in memory, turn mmap off "
        '("vllm_cpp":{"mmap":{"enabled":false}} or VT_GGUF_MMAP=0)'
    )


def _once(text: str) -> None:
    log.once(text, text)
