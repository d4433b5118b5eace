"""Activation offloading: what a layer saves for backward waits in host memory, and is back before backward wants it.

    compute stream   L0   L1   L2   L3   L4 | B4   B3    B2    B1    B0        5 layers, max_inflight_activations=1:
    copy stream           >0   >1   >2      |      2>    1>    0>              L3 and L4 are never moved

After a layer's forward its saved tensors are copied out by a stream of their own while the next layers compute; when
backward reaches a layer, the layers before it are copied in. At most `max_inflight_activations` layers, besides the one
that computes, are on the device, and this is a bound on memory, not a hope: before another layer begins, the compute
stream waits for the oldest copy, and the memory goes back to it in that order, however far ahead the host is.

What is moved are the storages behind saved tensors, each once: floats of at least `min_bytes`, no parameters, and
nothing that several layers save. With recomputation inside, that is what the recomputation keeps.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from prl.config.schema import ActivationOffloading
from prl.models.layers.decoder import Decoder
from prl.models.sharding import local_part
from prl.trainer.memory.host_memory import Arena, CopyStream, compute_waits
from prl.trainer.memory.saved_tensors import Stored, packing

MIN_BYTES = 1 << 20


def apply_activation_offload(
    model: Decoder, config: ActivationOffloading, device: torch.device, min_bytes: int = MIN_BYTES
) -> ActivationOffload | None:
    """Offload what each layer saves, if `config` says so. After activation checkpointing, before sharding.

    device: where the model computes. Returns the offloading, for its figures.
    """
    if not config.enabled:
        return None
    offload = ActivationOffload(config.max_inflight_activations, device, len(model.layers), min_bytes)
    for index, layer in enumerate(model.layers):
        layer.forward = offload.wrap(index, layer)  # on this instance alone; parameters keep their names
    return offload


@dataclass
class Traffic:
    """What was moved since the start, and how many layers' tensors are and were on the device at once."""

    bytes_out: int = 0
    bytes_in: int = 0
    layers_on_device: int = 0
    peak_layers_on_device: int = 0

    def arrive(self) -> None:
        self.layers_on_device += 1
        self.peak_layers_on_device = max(self.peak_layers_on_device, self.layers_on_device)


class ActivationOffload:
    """The layers of one model, forward pass by forward pass; several passes may wait for their backward."""

    def __init__(self, max_inflight_activations: int, device: torch.device, num_layers: int, min_bytes: int) -> None:
        self.limit, self.num_layers, self.min_bytes = max_inflight_activations, num_layers, min_bytes
        self.first_resident = num_layers - 1 - max_inflight_activations  # from here on backward comes soon enough
        self.device = device
        self.copies = CopyStream(device)
        self.traffic = Traffic()
        self.arenas: list[Arena] = []  # those that no graph needs
        self.arena = Arena(pinned=False)  # of the current pass
        self.current: ForwardPass | None = None
        self.newest: LayerRecord | None = None
        self.leaving: deque[LayerRecord] = deque()

    def wrap(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        """The forward of the layer at `index`."""
        forward, parameters = layer.forward, Parameters(layer)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            record = self.begin(index, parameters)
            with packing(record.pack):
                result = forward(*args, **kwargs)
            self.end(record)
            return result

        return run

    def begin(self, index: int, parameters: Parameters) -> LayerRecord:
        if index == 0:
            self.forget_pass()
            arena = self.arenas.pop() if self.arenas else Arena(pinned=self.device.type == "cuda")
            arena.clear()
            self.current = ForwardPass()
            # copies in and out share one stream: the next pass may write where this one is still being read
            weakref.finalize(self.current, self.arenas.append, arena).atexit = False
            self.arena = arena
        assert self.current is not None, "layers run in their order"
        residents = max(index - max(self.first_resident, 0), 0)
        while self.leaving and len(self.leaving) + residents > self.limit:
            self.leaving.popleft().leave()
        self.newest = LayerRecord(self, self.current, index, self.newest, parameters)
        return self.newest

    def end(self, record: LayerRecord) -> None:
        if record.index < self.first_resident and record.entries:
            record.send(self.arena)
            self.leaving.append(record)
        if record.index == self.num_layers - 1:
            self.forget_pass()

    def forget_pass(self) -> None:
        """From here on the graph owns it."""
        self.current = self.newest = None
        self.leaving.clear()


class ForwardPass:
    """Lives as long as the graph of one forward pass, and with it the arena."""

    def __init__(self) -> None:
        self.seen: set[StorageWeakRef] = set()  # saved by layers that are done


class LayerRecord:
    """What one layer saved in one forward pass. Handles in the graph keep it alive, and it those of earlier layers."""

    def __init__(
        self,
        offload: ActivationOffload,
        forward_pass: ForwardPass,
        index: int,
        previous: LayerRecord | None,
        parameters: Parameters,
    ) -> None:
        self.offload, self.forward_pass, self.index, self.previous = offload, forward_pass, index, previous
        self.parameters = parameters
        self.entries: dict[StorageWeakRef, Entry] = {}
        self.on_device, self.in_backward = False, False
        self.moved: torch.cuda.Event | None = None  # end of the last copy, out or in

    def __del__(self) -> None:
        self.offload.traffic.layers_on_device -= self.on_device

    def pack(self, tensor: Tensor) -> Tensor | Stored:
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.offload.min_bytes or not tensor.is_floating_point():
            return tensor
        ref = StorageWeakRef(storage)
        entry = self.entries.get(ref)
        if entry is None:
            if ref in self.forward_pass.seen or self.parameters.hold(ref):
                return tensor
            entry = self.entries[ref] = Entry(storage, tensor.device)
            if not self.on_device:
                self.on_device = True
                self.offload.traffic.arrive()
        return Handle(self, entry, tensor)

    # --- forward

    def send(self, arena: Arena) -> None:
        """Start copying to the host."""
        self.forward_pass.seen.update(self.entries)
        copies, traffic = self.offload.copies, self.offload.traffic
        copies.catch_up()
        for entry in self.entries.values():
            assert entry.on_device is not None
            entry.on_host = arena.take(entry.on_device.numel())
            copies.copy(entry.on_host, entry.on_device)
            traffic.bytes_out += entry.on_host.numel()
        self.moved = copies.mark()

    def leave(self) -> None:
        """Free the device's memory, in the compute stream's order after the copies."""
        compute_waits(self.moved)
        for entry in self.entries.values():
            entry.on_device = None
        self.on_device = False
        self.offload.traffic.layers_on_device -= 1

    # --- backward

    def enter_backward(self) -> None:
        """This layer's tensors are wanted now, and those of the layers before it soon."""
        if self.in_backward:
            return
        self.in_backward = True
        self.come_back()
        compute_waits(self.moved)
        record = self.previous
        for _ in range(self.offload.limit):
            if record is None:
                break
            record.come_back()
            record = record.previous

    def come_back(self) -> None:
        """Start copying to the device, unless it is there already."""
        if self.on_device or not self.entries:
            return
        self.on_device = True
        copies, traffic = self.offload.copies, self.offload.traffic
        traffic.arrive()
        entries = list(self.entries.values())[::-1]
        for entry in entries:
            assert entry.on_host is not None
            entry.on_device = torch.empty_like(entry.on_host, device=entry.device)
            traffic.bytes_in += entry.on_host.numel()
        copies.catch_up()  # the new memory may have been freed by work that the compute stream has yet to do
        for entry in entries:
            assert entry.on_host is not None
            assert entry.on_device is not None
            copies.copy(entry.on_device, entry.on_host)
        self.moved = copies.mark()


class Entry:
    """The storage behind one or more saved tensors, as bytes: on the device, on the host, or both while it moves."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.device = device
        self.on_device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.on_host: Tensor | None = None


class Handle:
    """Stands for a saved tensor in the graph."""

    def __init__(self, record: LayerRecord, entry: Entry, tensor: Tensor) -> None:
        self.record, self.entry = record, entry
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()

    def fetch(self) -> Tensor:
        self.record.enter_backward()
        whole = self.entry.on_device
        assert whole is not None
        tensor = torch.empty(0, dtype=self.dtype, device=whole.device)
        return tensor.set_(whole.untyped_storage(), self.offset, self.size, self.stride)


class Parameters:
    """The storages of a layer's parameters, be they sharded or gathered at the moment.

    FSDP swaps parameter objects (and experts' ones in the midst of the layer's forward), but always the same few.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.slots = [module._parameters for module in layer.modules() if module._parameters]
        self.known: dict[int, Tensor] = {}
        self.storages: set[StorageWeakRef] = set()

    def hold(self, ref: StorageWeakRef) -> bool:
        for slots in self.slots:
            for param in slots.values():
                if param is not None and id(param) not in self.known:
                    self.known[id(param)] = param
                    self.storages.add(StorageWeakRef(local_part(param).detach().untyped_storage()))
        return ref in self.storages
