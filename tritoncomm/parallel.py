"""Tensor- and sequence-parallel styles for ``torch.distributed.tensor.parallel.parallelize_module``.

The classes stand where torch's classes of the same names stand, with the same arguments. Parameters become the same
DTensors, so FSDP2, distributed checkpoints and optimizers see no difference. Activations are plain tensors between the
mappings of this package, where torch's styles wrap each of them in a DTensor and dispatch every operator through it,
which takes about twice the host time. Inputs that are DTensors are accepted.

Modules and layouts that these styles do not know (a subclass with a ``forward`` or parameters of its own, a
parametrized weight, a partial input, dropout, an embedding with ``max_norm``) get torch's own style.

Source: Megatron-LM (arXiv 1909.08053), sequence parallelism (arXiv 2205.05198).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import style

from tritoncomm import mappings
from tritoncomm.core import eager
from tritoncomm.core.autograd import direct, wants_grad
from tritoncomm.core.plan import Ints, chunk_sizes
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.groups import as_group
from tritoncomm.mappings.tensor_parallel import copy_to, reduce_from

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]


class ColwiseParallel(style.ColwiseParallel):
    """Shard a linear layer's output features, or an embedding's dims.

    Forward: all-gather of an input that is sharded; the output is sharded along its last dim, or redistributed from
    there to ``output_layouts``. Backward: all-reduce of the input's gradient, or reduce-scatter.

    Args:
        input_layouts: of a plain input: ``Replicate()``, the default, or ``Shard(dim)``.
        output_layouts: ``Shard(-1)``, the default, ``Shard(dim)`` or ``Replicate()``.
        use_local_output: return the local tensor, not a DTensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute a module's parameters and give it our ``forward``; unknown modules get torch's style."""
        _check(module, device_mesh)
        # For each kind of module its replacement, and the dim along which the weight is sharded.
        known = {nn.Linear: (ColwiseLinear, 0), nn.Embedding: (ColwiseEmbedding, 1)}
        if not _is_known(module, known, self.input_layouts, self.output_layouts):
            return _by_torch(super()._apply, module, device_mesh)
        kind, dim = known[_base(module)]
        _distribute(module, device_mesh, {"weight": Shard(dim), "bias": Shard(0)}, self.src_data_rank)
        return _attach(module, kind, device_mesh, self.input_layouts[0], self.output_layouts[0], self.use_local_output)


class RowwiseParallel(style.RowwiseParallel):
    """Shard a linear layer's input features, or an embedding's vocabulary.

    Forward: every rank multiplies its shard, or looks up the ids that it holds; the partial outputs are all-reduced,
    or reduce-scattered along ``output_layouts``' dim. Backward: identity, or all-gather.

    Args:
        input_layouts: of a plain input: ``Shard(-1)``, the default for linear layers; ``Replicate()`` for embeddings.
        output_layouts: ``Replicate()``, the default, or ``Shard(dim)``.
        use_local_output: return the local tensor, not a DTensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute a module's parameters and give it our ``forward``; unknown modules get torch's style."""
        _check(module, device_mesh)
        known = {nn.Linear: (RowwiseLinear, 1), nn.Embedding: (RowwiseEmbedding, 0)}
        is_known = _is_known(module, known, self.input_layouts, self.output_layouts)
        if isinstance(module, nn.Embedding):  # a rank without rows could look nothing up
            has_rows = all(chunk_sizes(module.num_embeddings, device_mesh.size()))
            is_known = is_known and has_rows and self.input_layouts[0].is_replicate()
        if not is_known:
            return _by_torch(super()._apply, module, device_mesh)
        kind, dim = known[_base(module)]
        _distribute(module, device_mesh, {"weight": Shard(dim), "bias": Replicate()}, self.src_data_rank)
        return _attach(module, kind, device_mesh, self.input_layouts[0], self.output_layouts[0], self.use_local_output)


class SequenceParallel(style.SequenceParallel):
    """Run a norm on a sequence shard; its parameters are replicated.

    Forward: no communication. Backward: all-reduce of the parameters' gradients, which are then equal on all ranks.

    Args:
        sequence_dim: the dim of the input that is sharded.
        use_local_output: return the local tensor, the default here (torch's default is a DTensor).
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute a module's parameters and give it our ``forward``; unknown modules get torch's style."""
        _check(module, device_mesh)
        # In the form of the other styles; the second entry, a dim to shard, is not used.
        known = {nn.LayerNorm: (SequenceLayerNorm, 0), nn.RMSNorm: (SequenceRMSNorm, 0)}
        (layout,) = self.sequence_sharding
        if not _is_known(module, known, (layout,), (layout,)):
            return _by_torch(super()._apply, module, device_mesh)
        # Torch's style does not send the parameters either.
        _distribute(module, device_mesh, {"weight": Replicate(), "bias": Replicate()}, None)
        return _attach(module, known[_base(module)][0], device_mesh, layout, layout, self.use_local_output)


class _Input(NamedTuple):
    """Input of a module.

    Attributes:
        local: the plain tensor.
        layout: its placement; ``Partial`` of a replica whose gradient is partial.
        sizes: sizes of the sharded dim on all ranks where they differ, which only a DTensor tells; else None.
    """

    local: Tensor
    layout: Placement
    sizes: Ints | None = None


class _Site:
    """Place where a module runs: its mesh, group and layouts. Copies of the module share it."""

    __slots__ = ("group", "input", "local_output", "mesh", "output", "world")

    def __init__(self, mesh: DeviceMesh, input: Placement, output: Placement, local_output: bool) -> None:
        self.mesh, self.input, self.output, self.local_output = mesh, input, output, local_output
        self.group: ProcessGroup = as_group(mesh, "parallelize_module")
        self.world = self.group.size()

    def __deepcopy__(self, memo: Any) -> "_Site":
        return self

    def __reduce__(self) -> Any:
        return _Site, (self.mesh, self.input, self.output, self.local_output)

    def local(self, x: Any, partial: bool = False) -> _Input:
        """Return an input as a plain tensor; ``partial``: the gradient of a replicated DTensor is partial."""
        if not isinstance(x, DTensor):
            return _Input(x, self.input)
        if x.device_mesh != self.mesh or len(x.placements) != 1:
            raise ArgumentError(f"parallelize_module: an input on {x.device_mesh} came to a module on {self.mesh}")
        (layout,) = x.placements
        if not isinstance(layout, Replicate | Shard):
            raise ArgumentError(f"parallelize_module: an input of layout {layout} has to be reduced first")
        if partial and layout.is_replicate():
            return _Input(x.to_local(grad_placements=(Partial(),)), Partial())
        sizes = self.sizes(x.shape[layout.dim]) if isinstance(layout, Shard) else None
        return _Input(x.to_local(), layout, sizes)

    def shard(self, x: Any) -> Tensor:
        """Return an input along whose sharded dim a norm runs; another DTensor is redistributed."""
        if isinstance(x, DTensor) and x.placements != (self.input,):
            x = x.redistribute(placements=(self.input,))
        return self.local(x).local

    def result(self, x: Tensor, shape: torch.Size | None = None) -> Any:
        """Return an output as the style promises it: the local tensor, or a DTensor of the layout ``output``.

        Args:
            shape: the global shape, where shards may be uneven; by default it follows from equal shards.
        """
        if self.local_output:
            return x
        stride = None if shape is None else torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, (self.output,), run_check=False, shape=shape, stride=stride)

    def result_of(self, x: Tensor, features: int) -> Any:
        """Return ``result``, where the last dim may be sharded unevenly: ``features`` is its global size."""
        if self.local_output or not self.is_last(x) or not self.sizes(features):
            return self.result(x)
        return self.result(x, torch.Size((*x.shape[:-1], features)))

    def is_last(self, x: Tensor) -> bool:
        """Whether the output is sharded along the last dim."""
        return isinstance(self.output, Shard) and self.output.dim in (-1, x.dim() - 1)

    def sizes(self, size: int) -> Ints | None:
        """Return the sizes of the shards of a dim, as DTensor splits it; None where they are equal."""
        return None if size % self.world == 0 else chunk_sizes(size, self.world)

    def replicated(self, x: Any) -> Tensor:
        """Return the input of a column-parallel layer, whose gradient is partial."""
        x, layout, sizes = self.local(x, partial=True)
        if isinstance(layout, Shard):
            return mappings.all_gather_dim(x, layout.dim, self.group, sizes=sizes)
        # In place: the layer's product alone uses the result, so its gradient is new memory that nothing else needs.
        return x if layout.is_partial() else copy_to(x, self.group, in_place=True)

    def whole_ids(self, x: Any) -> Tensor:
        """Return the ids of an embedding, of which every rank needs all."""
        ids, layout, sizes = self.local(x)
        return mappings.all_gather_dim(ids, layout.dim, self.group, sizes=sizes) if isinstance(layout, Shard) else ids

    def from_columns(self, x: Tensor, features: int) -> Any:
        """Return results that are sharded along the last dim, as ``output``."""
        if isinstance(self.output, Replicate):
            sizes = self.sizes(features)
            x = mappings.all_gather_dim(x, -1, self.group, tensor_parallel_output_grad=False, sizes=sizes)
        elif isinstance(self.output, Shard) and not self.is_last(x):
            x = mappings.all_to_all_dims(x, self.output.dim, -1, self.group, gather_sizes=self.sizes(features))
        return self.result_of(x, features)

    def summed(self, param: Tensor) -> Tensor:
        """Return a replicated parameter that works on a shard of the tokens. Backward: all-reduce of its gradient."""
        return mappings.copy_to_tensor_model_parallel_region(param, self.group)


@direct
class _Locals(Function):
    """Forward: the local tensors of parameters. Backward: their gradients, as DTensors of the parameters' layouts."""

    @staticmethod
    def forward(ctx: Any, *parameters: Any) -> Any:
        # Not ``to_local``: its backward searches for the layout again, which takes longer than the layer's own.
        ctx.set_materialize_grads(False)
        ctx.layouts = [None if each is None else each._spec for each in parameters]
        return tuple([None if each is None else each._local_tensor.view_as(each._local_tensor) for each in parameters])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return tuple([None if x is None else _distributed(x, spec) for x, spec in zip(grads, ctx.layouts, strict=True)])


def _distributed(grad: Tensor, spec: Any) -> DTensor:
    """Return the gradient of a parameter's local tensor as a DTensor of the parameter's layout ``spec``."""
    grad = grad.contiguous()
    if grad.requires_grad:
        shape = {"shape": spec.shape, "stride": spec.stride}
        return DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False, **shape)
    make: Any = DTensor  # its constructor has no annotation
    return make(grad, spec, requires_grad=False)


def _locals(*parameters: Any) -> Sequence[Any]:
    """Return the local tensors of parameters, which are DTensors, inside autograd; None stays None."""
    if is_compiling() or not all(x is None or (wants_grad(x) and x.is_contiguous()) for x in parameters):
        return [None if x is None else x.to_local() for x in parameters]
    return _Locals.apply(*parameters)


@direct
class _ScatterAndAdd(Function):
    """Forward: reduce-scatter x along ``dim``, then add ``bias``, which every rank has.

    Backward: all-gather; the bias takes its gradient from the gathered one, which is there, and not from a message.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.wants_bias = dim, group, bias.requires_grad
        return eager.reduce_scatter(x, dim, group, "reduce_scatter_dim") + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if grad.requires_grad:
            whole = mappings.all_gather_dim(grad, ctx.dim, ctx.group)
        else:
            whole = eager.all_gather(grad, ctx.dim, ctx.group, "reduce_scatter_dim.backward")
        of_bias = whole.sum(tuple(range(whole.dim() - 1))) if ctx.wants_bias else None
        return whole, of_bias, None, None


class ColwiseLinear(nn.Linear):
    """Linear layer with a shard of the output features; its ``forward`` runs in place of the module's own."""

    site: _Site

    def forward(self, input: Any) -> Any:
        site = self.site
        x = site.replicated(input)
        out = F.linear(x, *_locals(self.weight, self.bias))
        return site.from_columns(out, self.out_features)


class RowwiseLinear(nn.Linear):
    """Linear layer with a shard of the input features, whose partial products are summed over the ranks."""

    site: _Site

    def forward(self, input: Any) -> Any:
        site, (weight, bias) = self.site, _locals(self.weight, self.bias)
        x, layout, row_sizes = site.local(input)
        if isinstance(layout, Replicate):
            x = mappings.split_dim(x, -1, site.group, sizes=site.sizes(self.in_features))
        elif isinstance(layout, Shard) and layout.dim not in (-1, x.dim() - 1):
            sizes = site.sizes(self.in_features)
            x = mappings.all_to_all_dims(x, -1, layout.dim, site.group, scatter_sizes=sizes, gather_sizes=row_sizes)
        if not isinstance(site.output, Shard):
            out = reduce_from(F.linear(x, weight), site.group, in_place=True)
            return site.result(out if bias is None else out + bias.to(out.dtype))
        # The result is sharded: along its last dim, with the bias, or along another, with a whole bias on every rank.
        out = F.linear(x, weight)
        is_by_features = site.is_last(out)
        if bias is not None and not is_by_features and not is_compiling():
            # Autocast may have chosen the dtype of the product.
            return site.result(_ScatterAndAdd.apply(out, bias.to(out.dtype), site.output.dim, site.group))
        sizes = site.sizes(self.out_features) if is_by_features else None
        shard = mappings.reduce_scatter_dim(out, site.output.dim, site.group, sizes=sizes)
        if bias is not None and is_by_features:
            shard = shard + mappings.split_dim(bias.to(out.dtype), 0, site.group, sizes=sizes)
        elif bias is not None:  # compiled
            shard = shard + site.summed(bias).to(out.dtype)
        return site.result_of(shard, self.out_features)


class ColwiseEmbedding(nn.Embedding):
    """Embedding with a shard of the columns of its weight."""

    site: _Site

    def forward(self, input: Any) -> Any:
        site, (weight,) = self.site, _locals(self.weight)
        ids = site.whole_ids(input)
        return site.from_columns(F.embedding(ids, weight, self.padding_idx), self.embedding_dim)


class RowwiseEmbedding(nn.Embedding):
    """Embedding with a shard of the vocabulary; a rank adds zeros for ids that others hold."""

    site: _Site

    def forward(self, input: Any) -> Any:
        site, (weight,) = self.site, _locals(self.weight)
        ids = site.whole_ids(input)
        if not ids.is_cuda and not is_compiling() and bool(((ids < 0) | (ids >= self.num_embeddings)).any()):
            raise IndexError(f"embedding: an id is out of bounds for {self.num_embeddings} rows")  # a GPU would wait
        # This rank holds ids ``start`` to ``start + size - 1``. Other ids get row 0, then zeros below.
        size, start = len(weight), site.group.rank() * -(-self.num_embeddings // site.world)
        ids = ids - start
        outside = (ids < 0) | (ids >= size)
        padding = None if self.padding_idx is None else self.padding_idx - start
        padding = padding if padding is not None and 0 <= padding < size else None
        out = F.embedding(ids.masked_fill_(outside, 0), weight, padding)
        if isinstance(site.output, Shard):
            out = mappings.reduce_scatter_dim(out.masked_fill(outside.unsqueeze(-1), 0), site.output.dim, site.group)
        else:
            out = reduce_from(out.masked_fill(outside.unsqueeze(-1), 0), site.group, in_place=True)
        return site.result(out)


class SequenceLayerNorm(nn.LayerNorm):
    """Layer norm of a sequence shard, with replicated parameters."""

    site: _Site

    def forward(self, input: Any) -> Any:
        site = self.site
        x = site.shard(input)
        weight, bias = (None if each is None else site.summed(each) for each in _locals(self.weight, self.bias))
        shape = input.shape if isinstance(input, DTensor) else None
        return site.result(F.layer_norm(x, self.normalized_shape, weight, bias, self.eps), shape)


class SequenceRMSNorm(nn.RMSNorm):
    """RMS norm of a sequence shard, with replicated parameters."""

    site: _Site

    def forward(self, x: Any) -> Any:
        site, shape = self.site, x.shape if isinstance(x, DTensor) else None
        x = site.shard(x)
        (weight,) = (None if each is None else site.summed(each) for each in _locals(self.weight))
        return site.result(F.rms_norm(x, self.normalized_shape, weight, self.eps), shape)


def _base(module: nn.Module) -> type[nn.Module]:
    """Return torch's module as which ``module``, a subclass that keeps ``forward``, runs. ``nn.Module`` for none."""
    if "forward" in module.__dict__:
        return nn.Module
    kinds = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
    return next((kind for kind in kinds if type(module).forward is kind.forward), nn.Module)


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise for a module that is sharded already, and for a mesh that is not one group."""
    as_group(mesh, "parallelize_module")
    if "site" in module.__dict__:
        raise ArgumentError(f"parallelize_module: this {type(module).__name__} is sharded already; apply one plan once")


def _is_known(module: nn.Module, known: Any, *layouts: Any) -> bool:
    """Whether this package runs ``module`` in these layouts."""
    if _base(module) not in known or not all(type(one) in (Replicate, Shard) for each in layouts for one in each):
        return False
    parameters = module._parameters
    # A weight that is missing is computed from other parameters.
    if not {*parameters} <= {"weight", "bias"} or "weight" not in parameters:
        return False
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return True


def _distribute(module: nn.Module, mesh: DeviceMesh, layouts: dict[str, Placement], source: int | None) -> None:
    """Make the parameters DTensors, from the values of ``source``."""
    for name, param in list(module.named_parameters(recurse=False)):
        tensor = distribute_tensor(param, mesh, (layouts[name],), src_data_rank=source)
        _replace(module, name, param, nn.Parameter(tensor, requires_grad=param.requires_grad))


def _by_torch(apply: Callable[..., nn.Module], module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply torch's own style, which gives the module new parameters."""
    before = dict(module.named_parameters(recurse=False))
    module = apply(module, mesh)
    for name, param in before.items():
        new = module._parameters.get(name)
        if new is not None and new is not param:
            _replace(module, name, param, new)
    return module


_SHARDED = "tritoncomm_sharded"
"""Attribute of a parameter that was replaced: the new one, which takes its place in all modules that share it."""


def _replace(module: nn.Module, name: str, old: Tensor, new: Any) -> None:
    """Register ``new`` in the place of ``old``, or the parameter that already stands in its place in another module."""
    what = f"parallelize_module: {type(module).__name__}.{name}"
    # Nobody knows here which other modules share ``old``. A module outside of the plan keeps it, untied: the hook
    # raises once ``old`` gets a gradient.
    shared = getattr(old, _SHARDED, None)  # what another module has in its place already
    if shared is None:
        setattr(old, _SHARDED, new)
        if old.requires_grad and old.is_leaf:
            old.register_hook(_Untied(what))
    elif shared.device_mesh == new.device_mesh and shared.placements == new.placements:
        new = shared
    else:
        raise ArgumentError(
            f"{what} is shared with a module that holds it as {shared.placements}, and its own style wants "
            f"{new.placements}: choose styles that agree"
        )
    module.register_parameter(name, new)


class _Untied:
    """Gradient hook of a parameter that was replaced in one module, and that another one still has."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, grad: Tensor) -> None:
        raise UnsupportedError(
            f"{self._what} was shared with a module that is not in the plan, and still has the unsharded parameter; "
            "add that module to the plan"
        )


@lru_cache(maxsize=256)
def _class_of(kind: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """Return ``cls`` with the ``forward`` of ``kind``."""
    if cls in kind.__bases__:
        return kind

    def reduce(module: nn.Module, _: Any) -> Any:
        """Pickle a module as both classes and its state; see ``_empty``."""
        return _empty, (kind, cls), *object.__reduce_ex__(module, 2)[2:]

    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__, "__reduce_ex__": reduce})


def _empty(kind: type[nn.Module], cls: type[nn.Module]) -> nn.Module:
    """Return a module of ``_class_of``, whose attributes pickle sets."""
    # The class has no name that pickle could look up.
    return nn.Module.__new__(_class_of(kind, cls))


def _attach(module: nn.Module, kind: type[nn.Module], mesh: DeviceMesh, *layouts: Any) -> nn.Module:
    """Give a module the ``forward`` of ``kind``, and the site with the layouts; return the module."""
    # In place, by another class: hooks, parameters and references to the module stay as they are.
    module.__class__ = _class_of(kind, type(module))
    module.__dict__["site"] = _Site(mesh, *layouts)
    return module
