"""Sharding rules of operators: one row each, over one engine."""

from tritoncomm.tensor.rules import attention as attention
from tritoncomm.tensor.rules import cross_entropy as cross_entropy
from tritoncomm.tensor.rules import embedding as embedding
from tritoncomm.tensor.rules import foreach as foreach
from tritoncomm.tensor.rules import gradients as gradients
from tritoncomm.tensor.rules import indexing as indexing
from tritoncomm.tensor.rules import matmul as matmul
from tritoncomm.tensor.rules import normalization as normalization
from tritoncomm.tensor.rules import random_ops as random_ops
from tritoncomm.tensor.rules import reductions as reductions
from tritoncomm.tensor.rules import views as views

__all__: list[str] = []
