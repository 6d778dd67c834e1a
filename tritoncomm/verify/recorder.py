"""Records a step: hooks of modules, of parameters and of optimizers, and every operator that runs."""

import dataclasses
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tritoncomm.errors import ArgumentError
from tritoncomm.verify.recording import Call, Case, Recording, plain
from tritoncomm.verify.relations import Relation

__all__ = ["record"]

_COLLECTIVES = ("c10d", "_c10d_functional")
_STAGES, _INFERENCES = "torch.distributed.pipelining.stage", ("_shape_inference", "_forward_metadata_inference")


def _copied(x: Tensor) -> Tensor:
    """Return this rank's values in memory of their own, on the CPU."""
    x = plain(x)
    return x.clone() if x.is_cpu else x.cpu()


class _Watch(TorchDispatchMode):
    """Notes the narrowest floating-point dtype, the longest reduction and the collectives of all operators.

    Attributes:
        origins: by the address of memory, indices of the calls from whose outputs operators computed what it holds; of
            outputs without a graph.
    """

    def __init__(self, follow: Callable[[str | None], None] | None = None) -> None:
        super().__init__()
        self.follow = follow or (lambda name: None)
        self.narrowest, self.reduction, self.collectives = torch.float64, 1, 0
        self.origins: dict[int, frozenset[int]] = {}
        self._eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            self.collectives += 1
            self.follow(None)  # a collective begins
            result = func(*args, **(kwargs or {}))
            self._trace(args, (args, result))  # into tensors that were passed
            return result
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        for x in results:
            if isinstance(x, Tensor) and x.is_floating_point() and (eps := torch.finfo(x.dtype).eps) > self._eps:
                self.narrowest, self._eps = x.dtype, eps
        for x in args:
            if isinstance(x, Tensor) and x.dim():
                self.reduction = max(self.reduction, *x.shape)
        self._trace(args, result)
        return result

    def _trace(self, given: Any, results: Any) -> None:
        """Note that results were computed from what was given; one of nothing is new, whatever its memory held."""
        if self.origins:
            self.mark(results, frozenset[int]().union(*(self.origins.get(_address(x), ()) for x in _tensors(given))))

    def mark(self, results: Any, sources: frozenset[int]) -> None:
        """Note the calls that tensors are from."""
        for address in filter(None, map(_address, _tensors(results))):
            if sources:
                self.origins[address] = sources
            else:
                self.origins.pop(address, None)


def _address(x: Tensor) -> int:
    """Return the address of a tensor's memory; 0 of one that has none, or is known to its own class alone."""
    if hasattr(x, "to_local"):
        x = x.to_local()  # pyright: ignore
    is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta
    return x.untyped_storage().data_ptr() if is_plain else 0


class _Recorder:
    """Takes the calls of modules into a recording."""

    def __init__(self, recording: Recording, watch: _Watch, backward: bool) -> None:
        self.recording, self.watch, self.backward, self.counts = recording, watch, backward, Counter[str]()
        self.known: dict[int, tuple[Tensor, int, int]] = {}  # by id: the tensor, its version, its index
        self.started: list[int] = []
        self.makers: dict[Any, list[int]] = {}  # by node of autograd's graph: calls with an output of that node

    def before(self, name: str) -> Callable[..., None]:
        """Return the hook of a module that begins: it notes the collectives before the call."""

        def hook(*_: Any) -> None:
            self.watch.follow(name)
            self.started.append(self.watch.collectives)
            self.recording.has_autocast |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))

        return hook

    def after(self, name: str, module: nn.Module) -> Callable[..., None]:
        """Return the hook of a module."""
        signature: inspect.Signature | None = None
        is_read = False

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            started = self.started.pop() if self.started else 0
            if torch._C._current_autograd_node() is not None:  # pyright: ignore  (recomputed in backward)
                return
            if _infers_shapes():
                return
            nonlocal signature, is_read
            if not is_read:  # at the first call, and once
                signature, is_read = _signature(module), True
            given = dict(_named(_bound(signature, args, kwargs)))
            if not name and not self.counts[name]:  # the first call of the whole model: the inputs of the step
                self.recording.inputs = {key: _copied(x).double() for key, x in given.items() if not x.is_complex()}
            index, watch = len(self.recording.calls), self.watch
            sources = self._sources(given.values())
            inputs = {key: slot for key, x in given.items() if (slot := self._taken(x)) is not None}
            outputs = [slot for x in _tensors(output) if (slot := self._taken(x)) is not None]
            collectives = started, watch.collectives
            self.recording.calls.append(
                Call(name, self.counts[name], inputs, outputs, watch.narrowest, watch.reduction, collectives, sources)
            )
            for x in _tensors(output):
                if x.grad_fn is None:
                    watch.mark(x, frozenset((index,)))
                else:
                    self.makers.setdefault(x.grad_fn, []).append(index)
                if self.backward and x.requires_grad and (slot := self._taken(x)) is not None:
                    x.register_hook(partial(self._take_gradient, slot, x))
            self.counts[name] += 1

        return hook

    def _take_gradient(self, slot: int, x: Tensor, gradient: Tensor | None) -> None:
        """Copy the gradient of an output; of one that a backward gave none there is nothing to copy."""
        if gradient is not None:
            self.recording.backward[slot] = _copied(_as_held(gradient, x))

    def _sources(self, inputs: Collection[Tensor]) -> list[int]:
        """Return the calls behind some inputs: those of operators, and up autograd's graph the first ones."""
        sources = set[int]().union(*(self.watch.origins.get(_address(x), ()) for x in inputs))
        seen, nodes = set[Any](), [x.grad_fn for x in inputs]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.makers:
                sources.update(self.makers[node])
            else:
                nodes += [each for each, _ in node.next_functions]
        return sorted(sources)

    def _taken(self, x: Tensor) -> int | None:
        """Copy a floating-point or complex tensor, once; return its index."""
        if not (x.is_floating_point() or x.is_complex()):
            return None
        entry = self.known.get(id(x))
        if entry is None or entry[1] != x._version:
            self.known[id(x)] = entry = x, x._version, len(self.recording.tensors)
            self.recording.tensors.append(_copied(x))
        return entry[2]


# TODO: delete when a stage of torch.distributed.pipelining tells a forward that only infers shapes from one of a step:
# torch 2.13 runs it with real tensors and a graph, by a private method; older releases have the other name.
def _infers_shapes() -> bool:
    """Whether a stage of torch's pipelines calls the module to learn what it will send."""
    if _STAGES not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _INFERENCES and frame.f_globals.get("__name__") == _STAGES:
            return True
        frame = frame.f_back
    return False


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among nested lists, tuples, mappings and dataclasses, as outputs of modules are."""
    return (x for _, x in _named(values))


def _named(values: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among nested values, each with its keys and places joined by dots."""
    if isinstance(values, Tensor):
        yield name, values
        return
    if isinstance(values, Mapping):
        inner = values.items()
    elif isinstance(values, list | tuple):
        inner = enumerate(values)
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        inner = ((each.name, getattr(values, each.name, None)) for each in dataclasses.fields(values))
    else:
        return
    for key, value in inner:
        yield from _named(value, f"{name}.{key}" if name else str(key))


def _signature(module: nn.Module) -> inspect.Signature | None:
    """Return the signature of a forward; None of one that has none, as those of TorchScript."""
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def _bound(signature: inspect.Signature | None, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return arguments by the names of a signature; by their places where it does not take them."""
    by_place = {str(place): value for place, value in enumerate(args)} | kwargs
    if signature is None:
        return by_place
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:  # a hook of the program has given the forward other arguments
        return by_place
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    return bound


def record(
    case: Case,
    *,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    to: str | Path | None = None,
    follow: Callable[[str | None], None] | None = None,
    backward: bool = False,
) -> Recording:
    """Run the step of a case, and record it.

    Args:
        only, skip: patterns (``"layers.0.*"``) of the names of modules, as in the run of one process, whose inputs and
            outputs are recorded or not; parameters and gradients are recorded in any case.
        to: file to write the recording to, which ``Recording.load`` reads.
        follow: called with the name of every module that begins, and with None before every collective.
        backward: record the gradients of outputs, too. With them a fault in a module can be told from one between the
            last module and the loss, and from one in what the program does with gradients after backward.

    Raises:
        ArgumentError: the case has no module, or two of its names are the same in the run of one process.
    """
    modules = case.modules
    if not modules:
        raise ArgumentError("verify.record: the case has no modules")
    recording, watch = Recording(relations=dict(case.relations)), _Watch(follow)
    recorder = _Recorder(recording, watch, backward)
    stepped = dict[str, Tensor | None]()  # gradients of parameters that an optimizer has stepped; a hook fills it
    with ExitStack() as hooks:
        # A wrapper and the module inside it may have the same name in one process. Then the inner one is recorded.
        by_whole_name = {case.whole_module(name): module for name, module in modules.items()}
        for whole_name, module in by_whole_name.items():
            if whole_name is None:
                continue
            recording.modules.append(whole_name)
            if (only is None or _matches(whole_name, only)) and not _matches(whole_name, skip):
                hooks.callback(module.register_forward_pre_hook(recorder.before(whole_name), prepend=True).remove)
                after = recorder.after(whole_name, module)
                hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        _take_parameters(case, recording)
        for parameter, whole in _by_whole_name(case, case.parameters):
            if parameter.is_leaf and parameter.requires_grad:
                hook = partial(_take_accumulated, recording, whole)
                hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        hooks.callback(register_optimizer_step_pre_hook(partial(_take_stepped, case, stepped)).remove)
        # Compiled modules would not call the hooks of those inside.
        hooks.enter_context(torch.compiler.set_stance("force_eager"))
        with watch:
            loss = case.step()
    recording.loss = None if loss is None else _copied(loss)
    recording.narrowest, recording.reduction = watch.narrowest, watch.reduction
    for parameter, whole in _by_whole_name(case, case.parameters):
        if whole not in stepped:
            _take_gradient(case, parameter, whole, stepped)
    recording.gradients = {whole: stepped[whole] for _, whole in _by_whole_name(case, case.parameters)}
    _take_changes(case, recording)
    if to is not None:
        Path(to).write_bytes(recording.to_bytes())
    return recording


def _by_whole_name(case: Case, tensors: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield parameters or buffers with their names in the run of one process."""
    for name, x in tensors.items():
        if (whole := case.whole_name(name)) is not None:
            yield x, whole


def _take_accumulated(recording: Recording, name: str, parameter: Any) -> None:
    """Copy the gradient that backward has just accumulated."""
    if parameter.grad is not None:
        recording.accumulated[name] = _copied(parameter.grad)


def _take_stepped(case: Case, gradients: dict[str, Tensor | None], optimizer: Any, *_: Any) -> None:
    """Copy the gradients that an optimizer is about to read, as many a step ends with their deletion."""
    stepped = {id(x) for group in optimizer.param_groups for x in group["params"]}
    for parameter, whole in _by_whole_name(case, case.parameters):
        if id(parameter) in stepped:
            _take_gradient(case, parameter, whole, gradients)


def _take_gradient(case: Case, parameter: Any, whole: str, gradients: dict[str, Tensor | None]) -> None:
    """Copy the gradient of a parameter; None if it has none."""
    gradient = _as_held(case.gradient(parameter), parameter)
    gradients[whole] = None if gradient is None else _copied(gradient)


def _take_changes(case: Case, recording: Recording) -> None:
    """Copy the parameters and buffers that the step has changed."""
    values = {whole: case.value(parameter) for parameter, whole in _by_whole_name(case, case.parameters)}
    values |= {whole: x for x, whole in _by_whole_name(case, case.buffers)}
    for name, x in values.items():
        before, value = recording.parameters.get(name, recording.buffers.get(name)), plain(x).cpu()
        # A parameter of another shape is one that a forward gathered, and no backward has dealt out again.
        if before is None or (before.shape, before.dtype) != (value.shape, value.dtype):
            continue
        if not torch.equal(before, value):
            recording.changed[name] = value.clone()


def _as_held(gradient: Any, parameter: Any) -> Any:
    """Return a DTensor's gradient in the layout of its parameter, as optimizers see it: it may be of addends."""
    held = getattr(parameter, "placements", None)
    if held is None or getattr(gradient, "placements", held) == held:
        return gradient
    return gradient.redistribute(placements=held)


def _take_parameters(case: Case, recording: Recording) -> None:
    """Copy the parameters into a recording, and note which are tied."""
    names: dict[int, list[str]] = {}
    for parameter, whole in _by_whole_name(case, case.parameters):
        if whole in recording.parameters:
            raise ArgumentError(f"verify.record: two parameters are {whole!r} in the run of one process")
        recording.parameters[whole] = _copied(case.value(parameter))
        if whole not in recording.relations and (relation := _nested_split(parameter)) is not None:
            recording.relations[whole] = relation
        names.setdefault(id(parameter), []).append(whole)
    recording.tied = {each[0]: each for each in names.values() if len(each) > 1}
    for x, whole in _by_whole_name(case, case.buffers):
        recording.buffers[whole] = _copied(x)


def _nested_split(parameter: Any) -> Relation | None:
    """Return the relation of a DTensor over all ranks of which a dim is split evenly more than once; else None."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    cut: list[tuple[int, Any]] = [
        (axis, each) for axis, each in enumerate(getattr(parameter, "placements", ())) if hasattr(each, "dim")
    ]
    if mesh is None or len({each.dim for _, each in cut}) == len(cut):
        return None
    if mesh.mesh.flatten().tolist() != [*range(mesh.size())] or any(
        parameter.shape[p.dim] % mesh.size() for _, p in cut
    ):
        return None
    # (dim, chunks, ranks from one chunk to the next), in the order in which the tensor was cut: axis by axis, but a
    # strided shard after the later axes, as FSDP2 cuts the shards of tensor parallelism.
    splits: list[tuple[int, int, int]] = []
    for axis, placement in reversed(cut):
        is_cut_last = hasattr(placement, "split_factor")
        split = placement.dim, mesh.size(axis), math.prod(mesh.shape[axis + 1 :])
        splits.insert(len(splits) if is_cut_last else 0, split)
    return Relation(tuple(splits))


def _matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name is one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
