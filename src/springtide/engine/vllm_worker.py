"""What runs inside vLLM, in vLLM's own environment: its server's entry, and how published weights get into the model.

Owns: the weight transfer `springtide` in vLLM's own registry, and the server's end with the process that started it.
Invariants: a version is read and verified whole before the model is touched, so a bad one leaves it as it was; a
parameter of the model that a version does not hold is an error; the server and all it started die with their parent.
Called by: vLLM (`--worker-extension-cls` imports this module in every worker); `engine.vllm_server` runs it as
`PYTHON -c SERVE --model MODEL ...`. Needs nothing there but vLLM and this package's source.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from springtide.weights.store import FingerprintMismatch, WeightStore

NAME = "springtide"  # of the transfer in vLLM's registry


@dataclass
class StoreInfo(WeightTransferInitInfo):
    """Where versions are published."""

    store: str


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    version: int


class StoreTransfer(WeightTransferEngine[StoreInfo, VersionInfo]):
    """Pulls a version from the store, by checkpoint name, through the model's own loader, in place."""

    init_info_cls = StoreInfo
    update_info_cls = VersionInfo

    def init_transfer_engine(self, init_info: StoreInfo) -> None:
        self._store = WeightStore(Path(init_info.store))

    def start_weight_update(self) -> None:
        """Nothing yet: the model stays usable until the version is verified."""

    def update_weights(self, update_info: dict[str, int]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # all is done when it returns: nothing to wait for

    def receive_weights(self, update_info: VersionInfo) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        tensors = self._store.load(update_info.version)
        wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_tied(self.model)
        if missing := wanted - loaded:
            raise FingerprintMismatch(
                f"version {update_info.version}: vLLM's {type(self.model).__name__} was given no {sorted(missing)[0]}"
            )

    def finish_weight_update(self) -> None:
        """Nothing more: `update_weights` was whole."""

    def shutdown(self) -> None:
        pass


def _pack_tied(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs every linear layer's weight; its reload forgets that of a head tied to the embedding."""
    owners: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and id(weight) in owners and hasattr(module, "cpu_linear"):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
        owners.add(id(weight))


WeightTransferEngineFactory.register_engine(NAME, StoreTransfer)


class Registered:
    """What `--worker-extension-cls` names, so that every worker imports this module. It extends nothing."""


def serve() -> None:
    """vLLM's HTTP server with the arguments of the command line; it ends with the process at the other end of stdin."""
    from vllm.entrypoints.launchers.api_server.entry import main  # `vllm serve` does not run in the CPU distribution

    def wait() -> None:
        os.read(0, 1)  # the parent writes nothing: it returns when the parent is gone
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    main()
