"""How the bytes of a tensor are counted: which device's, and in what sizes its allocator hands them out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Counting:
    """Whose bytes count.

    Attributes:
        device: the device that the trace is about.
        lives_on: the device that its tensors say they are on: ``device`` itself, or one that stands in for it.
    """

    device: torch.device
    lives_on: torch.device

    @staticmethod
    def on(device: torch.device) -> Counting:
        """Count what lives on this device."""
        return Counting(device, device)

    @property
    def is_of_cpu(self) -> bool:
        """Whether what counts is what the tensors of the CPU need, as they say it."""
        return self.device is self.lives_on and self.device.type == "cpu"

    def size(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> int:
        """Bytes of a tensor's storage, rounded up to what the allocator hands out; 0 for one that lives elsewhere."""
        if tensor.device != self.lives_on:
            return 0
        # Where one device stands in for two, a fake tensor with a known value is a scalar that the step keeps on the host.
        if self.device is not self.lives_on and getattr(tensor, "constant", None) is not None:
            return 0
        exact = storage.nbytes()
        return exact if self.device.type != "cuda" else -(-exact // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES
