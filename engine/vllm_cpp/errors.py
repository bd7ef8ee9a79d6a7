"""Every error this library raises on purpose.

Owns the exception tree; each class carries the C status that `libvllm` returns for it (see include/vllm.h), so no door has to guess.
Must not know who raises what: it imports nothing.
"""

from __future__ import annotations


class VllmError(Exception):
    """Base of every error raised on purpose. `status` is the `vllm_status` the C functions return for it."""

    status = 4  # VLLM_ERR_UNKNOWN


class InvalidArgumentError(VllmError, ValueError):
    """The caller's argument or document is wrong; found before any model I/O."""

    status = 1  # VLLM_ERR_INVALID_ARGUMENT


class UnknownKeywordError(InvalidArgumentError, TypeError):
    """A keyword that no parameter answers to; the text names the nearest one."""


class ModelLoadError(VllmError):
    """The arguments were accepted, but the model (or a named device) could not be brought up."""

    status = 2  # VLLM_ERR_MODEL_LOAD


class GenerationError(VllmError, RuntimeError):
    """Generation failed after the model was loaded; the engine serves on."""

    status = 3  # VLLM_ERR_RUNTIME


class InternalError(VllmError, RuntimeError):
    """A broken promise inside the library: please report it."""

    status = 4  # VLLM_ERR_UNKNOWN
