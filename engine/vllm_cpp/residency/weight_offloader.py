"""vLLM-style weight offload while a model is loaded: which weights stay off the device.

Owns: the running decision (uva counts bytes against its budget; prefetch goes by layer), the refusals before and after a load, and the
count of questions. Must not know how a weight is kept in host memory or read from there: a loader asks, and acts on the answer.
"""

from __future__ import annotations

from vllm_cpp.config.offload import WeightOffload
from vllm_cpp.config.offload.weight_offload import names_weight
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.residency.devices import Device


class WeightOffloader:
    """Asked by a loader about every weight, in the order in which it loads them."""

    def __init__(self, config: WeightOffload) -> None:
        self._config = config
        self._backend = config.resolved_backend
        self.consulted = 0
        self.offloaded_bytes = 0

    def keeps_off_device(self, name: str, n_bytes: int, layer: int | None) -> bool:
        """Whether this weight stays in host memory. `layer` is None for what belongs to no layer."""
        self.consulted += 1
        off = self._uva(name) if self._backend == "uva" else self._prefetch(name, layer)
        if off:
            self.offloaded_bytes += n_bytes
        return off

    def _uva(self, name: str) -> bool:
        # vLLM tests the budget before a weight and never against its size, so the last one may overshoot it.
        if self.offloaded_bytes >= self._config.budget_bytes:
            return False
        return not self._config.cpu_offload_params or names_weight(self._config.cpu_offload_params, name)

    def _prefetch(self, name: str, layer: int | None) -> bool:
        if layer is None or not self._config.offloads_layer(layer):
            return False
        return not self._config.prefetch_params or names_weight(self._config.prefetch_params, name)

    def refuse_unconsulted(self, architecture: str) -> None:
        """After a load: a loader that claims support and asked about nothing has a defect, and none of it is the user's."""
        if self.consulted == 0:
            raise ModelLoadError(
                f'the loader of architecture "{architecture}" claims to support weight offload and consulted the offloader about no '
                "weight, so the budget freed nothing. This is a defect of that loader, not of the configuration: please report it"
            )


def offloader_for(config: WeightOffload, *, architecture: str, consults: bool, device: Device) -> WeightOffloader | None:
    """The offloader of a load, or None when none is enabled. Refused before any weight is read where it could free nothing.

    `consults`: this architecture's loader says that it asks.
    """
    if not config.enabled:
        return None
    frees_nothing = f"The device here is {device.name}: its weights are in host memory already, and offloading to the CPU frees nothing."
    on_host = device.name == "cpu"
    if not consults:
        raise ModelLoadError(
            f'weight offload is configured but architecture "{architecture}" does not support it: its loader does not consult the weight '
            "offloader, so every weight would stay on the device and the budget would free nothing. Remove --offload-config, or wire this "
            f"model's loader.{f' ({frees_nothing})' if on_host else ''}"
        )
    if on_host:
        raise ModelLoadError(f"weight offload is configured and would free nothing. {frees_nothing} Remove uva and prefetch")
    return WeightOffloader(config)
