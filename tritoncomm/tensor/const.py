"""TensorType of ColossalAI's contract."""

import enum

__all__ = ["TensorType"]


class TensorType(enum.Enum):
    """Whether a tensor is part of the model or of the data."""

    MODEL = 0
    NONMODEL = 1
