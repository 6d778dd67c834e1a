"""Preparation of a model for a comparison: values that differ from each other, and no noise."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["draw", "without_noise"]

_NOISE = re.compile(
    r"drop(out|_?path)?(_p|_prob|_rate)?$|(^|_)p_?drop|dropout|jitter|router_noise|noise_std", re.IGNORECASE
)
_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


def draw(model: nn.Module, seed: int = 0) -> None:
    """Draw all floating-point parameters anew, so that none is zero, one or the same as another.

    Parameters of two dims and more are normal numbers times ``1 / sqrt(columns)``. Others are ``1 + 0.2 * normal`` if
    all of their values were above 0.5, as the weights of norms are, else ``0.2 * normal``. All values are rounded to
    float32, so that they are the same whether a program keeps a parameter in float32 or in float64. The same seed gives
    the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                values /= parameter.shape[-1] ** 0.5
            else:
                values = 0.2 * values + float(bool((parameter > 0.5).all()))
            values = values.float()
            mesh: Any = getattr(parameter, "device_mesh", None)
            if mesh is not None:  # a program that shards its model in one process, too
                from torch.distributed.tensor import distribute_tensor  # its import takes a second

                values = distribute_tensor(values.to(parameter.dtype), mesh, parameter.placements)  # pyright: ignore
            parameter.copy_(values)


def without_noise(model: nn.Module) -> list[str]:
    """Set dropout and router noise of all modules to 0; return what was changed, in words.

    Probabilities are found by the names of attributes (``p`` of torch's dropout, ``attention_dropout``, ``jitter``...),
    of modules and of their ``config``.
    """
    changed = []
    for name, module in model.named_modules():
        for owner, label in ((module, name), (getattr(module, "config", None), f"{name}.config")):
            for attribute, value in _noises(owner):
                try:
                    setattr(owner, attribute, type(value)(0))
                except (AttributeError, TypeError):
                    continue
                changed.append(f"{label}.{attribute} = {value:g}".lstrip("."))
    return changed


def _noises(owner: Any) -> Iterator[tuple[str, float]]:
    """Yield (attribute, value) of the probabilities of an object."""
    if owner is None or not hasattr(owner, "__dict__"):
        return
    is_dropout = isinstance(owner, _DROPOUTS)
    for attribute, value in list(vars(owner).items()):
        if isinstance(value, float) and value and ((is_dropout and attribute == "p") or _NOISE.search(attribute)):
            yield attribute, value
