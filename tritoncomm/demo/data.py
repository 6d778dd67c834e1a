"""Bytes to train on: the documentation inside Python, or a file."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tritoncomm.demo.settings import Settings

__all__ = ["batches", "check_text", "read_text"]


def read_text(path: str | None) -> bytes:
    """Return the file's bytes, or all of ``pydoc_data.topics``."""
    if path is not None:
        return Path(path).read_bytes()
    # 0.5 MB of text that only this case needs.
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics)).encode()


def check_text(settings: Settings) -> None:
    """Reject a text that cannot be read or is too short, before anything starts."""
    next(batches(settings))


def batches(settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (input, target) of shape ``[sequence, batch]`` for every step, equal in all processes."""
    content, span = read_text(settings.text), settings.sequence + 1
    if len(content) <= span:
        raise ValueError(f"the text has {len(content)} bytes, but one sequence needs {span + 1}")
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    for _ in range(settings.steps):
        starts = torch.randint(len(text) - span, (settings.batch,), generator=generator)
        window = torch.stack([text[start : start + span] for start in starts.tolist()], dim=1).long()
        yield window[:-1], window[1:]
