"""Which devices a group moves tensors of, and where received tensors live when nothing else says so."""

import torch
from torch.distributed import ProcessGroup

__all__ = ["cuda_backend", "default_device"]

_CUDA = torch.device("cuda")


def cuda_backend(group: ProcessGroup) -> str:
    """Name of the backend that carries CUDA tensors in ``group``, empty where none does."""
    if all(kind.type != "cuda" for kind in group._device_types):
        return ""
    return group._get_backend(_CUDA).name().lower()


def default_device(group: ProcessGroup) -> torch.device:
    """The current GPU where the group moves CUDA tensors over NCCL, else the CPU."""
    if not torch.cuda.is_available() or cuda_backend(group) in ("", "gloo"):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
