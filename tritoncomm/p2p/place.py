"""Where received tensors live when nothing else says so."""

import torch
from torch.distributed import ProcessGroup

__all__ = ["default_device"]


def default_device(group: ProcessGroup) -> torch.device:
    """The current GPU where the group moves CUDA tensors over NCCL, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    cuda = torch.device("cuda", torch.cuda.current_device())
    moves_cuda = any(kind.type == "cuda" for kind in group._device_types)
    return cuda if moves_cuda and group._get_backend(cuda).name().lower() != "gloo" else torch.device("cpu")
