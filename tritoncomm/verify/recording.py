"""One training step of a model, recorded: inputs and outputs of every module, parameters and gradients."""

import io
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritoncomm.errors import ArgumentError
from tritoncomm.verify.relations import Relation

__all__ = ["Call", "Case", "Recording", "draw", "gradient_of", "plain", "record", "without_noise"]

_NOISE = re.compile(
    r"drop(out|_?path)?(_p|_prob|_rate)?$|(^|_)p_?drop|dropout|jitter|router_noise|noise_std", re.IGNORECASE
)
_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
_COLLECTIVES = ("c10d", "_c10d_functional")
_STAGES, _INFERENCES = "torch.distributed.pipelining.stage", ("_shape_inference", "_forward_metadata_inference")
ROOT: Final = "the model"


def plain(x: Tensor) -> Tensor:
    """Return this rank's values as an ordinary tensor without a graph: the local part of a DTensor or ColoTensor."""
    x = x.detach()
    if hasattr(x, "to_local"):
        x = x.to_local()  # pyright: ignore
    if hasattr(x, "wait"):  # a functional collective's result in flight
        x = x.wait()  # pyright: ignore
    return x if type(x) is Tensor else x.as_subclass(Tensor)


def _copied(x: Tensor) -> Tensor:
    """Return this rank's values in memory of their own, on the CPU."""
    x = plain(x)
    return x.clone() if x.is_cpu else x.cpu()


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient that the optimizer will read: ``main_grad`` of Megatron's buffers, else ``grad``."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _itself(parameter: nn.Parameter) -> Tensor:
    """Return a parameter."""
    return parameter


@dataclass(frozen=True)
class Case:
    """One training step of a parallel program, or of the same program in one process.

    Attributes:
        model: the modules of this rank; several chunks of a pipeline have names that begin with their number.
        step: forward and backward of one step; returns the loss, or None where a rank has none.
        rename: from the name of a parameter or module to its name in the run of one process; None leaves it out. A
            mapping keeps names that it does not have. A module ``a`` is looked up as ``a.``, too.
        gradient: returns the gradient of a parameter, by default ``main_grad``, then ``grad``.
        value: returns the values of a parameter, by default its own; for programs that keep them elsewhere (ZeRO-3).
        relations: what ranks hold of a tensor where the search cannot know, by name or pattern (``"*.qkv.weight"``):
            of a parameter and its gradient, or of a module's outputs. ``"gradient *"`` is for gradients alone: they may
            be addends of several ranks only where this says so.
    """

    model: nn.Module | Sequence[nn.Module]
    step: Callable[[], Tensor | None]
    rename: Callable[[str], str | None] | Mapping[str, str] = field(default_factory=dict)
    gradient: Callable[[nn.Parameter], Tensor | None] = gradient_of
    value: Callable[[nn.Parameter], Tensor] = _itself
    relations: Mapping[str, Relation] = field(default_factory=dict)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by its name in this program, outer ones first."""
        if isinstance(self.model, nn.Module):
            return dict(self.model.named_modules())
        chunks = enumerate(self.model)
        return {f"{i}.{name}".rstrip("."): each for i, chunk in chunks for name, each in chunk.named_modules()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by its name in this program; tied ones by each of their names."""
        if isinstance(self.model, nn.Module):
            return dict(self.model.named_parameters(remove_duplicate=False))
        return {
            f"{i}.{name}": each
            for i, chunk in enumerate(self.model)
            for name, each in chunk.named_parameters(remove_duplicate=False)
        }

    def whole_name(self, name: str) -> str | None:
        """Return the name of a parameter in the run of one process; None if it is not compared."""
        return self.rename(name) if callable(self.rename) else self.rename.get(name, name)

    def whole_module(self, name: str) -> str | None:
        """Return the name of a module in the run of one process; None if it is not compared."""
        if not callable(self.rename):
            prefixes = (new.removesuffix(old.removeprefix(f"{name}.")) for old, new in self.rename.items()
                        if old.startswith(f"{name}.") and new.endswith(old.removeprefix(f"{name}.")))  # fmt: skip
            return self.rename.get(name, next((each.rstrip(".") for each in prefixes), name))
        renamed = self.rename(f"{name}.") if name else self.rename(name)
        return None if renamed is None else renamed.rstrip(".")


@dataclass
class Call:
    """One forward of a module.

    Attributes:
        name: of the module in the run of one process.
        number: of this call among those of the module, from 0.
        inputs, outputs: indices of tensors in ``Recording.tensors``.
        narrowest: narrowest floating-point dtype that any operator had produced by the end of the call.
        reduction: most addends of an operator until then.
        collectives: calls of a backend in the step before it began, and by its end.
        sources: indices of the calls in ``Recording.calls`` from whose outputs its inputs were computed, as far as
            autograd's graph shows, without a call between.
        has_graph: whether an output is in autograd's graph.
    """

    name: str
    number: int
    inputs: list[int]
    outputs: list[int]
    narrowest: torch.dtype
    reduction: int
    collectives: tuple[int, int]
    sources: list[int] = field(default_factory=list)
    has_graph: bool = False


@dataclass
class Recording:
    """Record of one step on one rank, or in one process; made by ``record``.

    Attributes:
        calls: of modules, in the order in which they ended.
        tensors: inputs and outputs of the calls, each once.
        parameters, gradients: by their names in the run of one process; a gradient may be None.
        tied: for a parameter that has several names all of them, by the first.
        inputs: floating-point and integer tensors that the model was first called with, in float64.
        loss: what the step returned.
        narrowest, reduction: over the whole step.
        modules: names of all modules, called or not.
        relations: of the case.
        noise: attributes that draw random numbers, in words.
        exact: the same step in float64, for a step in 16 bits: the distance of the two is what rounding does.
        has_autocast: whether a module was called under autocast.
    """

    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    narrowest: torch.dtype = torch.float64
    reduction: int = 1
    modules: list[str] = field(default_factory=list)
    relations: dict[str, Relation] = field(default_factory=dict)
    noise: list[str] = field(default_factory=list)
    exact: "Recording | None" = None
    has_autocast: bool = False

    @property
    def is_rounded(self) -> bool:
        """Whether an operator of the step had a result in 16 bits or fewer."""
        return torch.finfo(self.narrowest).eps > torch.finfo(torch.float32).eps

    def to_bytes(self) -> bytes:
        """Return the recording as bytes, for a file or another rank."""
        torch.save(self, stream := io.BytesIO())
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Recording":
        """Return the recording that ``to_bytes`` wrote; only of a file that you trust."""
        return torch.load(io.BytesIO(content), weights_only=False)

    @classmethod
    def load(cls, path: str | Path) -> "Recording":
        """Read the file that ``record(..., to=path)`` wrote; only one that you trust."""
        return cls.from_bytes(Path(path).read_bytes())


class _Watch(TorchDispatchMode):
    """Notes the narrowest floating-point dtype, the longest reduction and the collectives of all operators."""

    def __init__(self, follow: Callable[[str | None], None] | None = None) -> None:
        super().__init__()
        self.follow = follow or (lambda name: None)
        self.narrowest, self.reduction, self.collectives = torch.float64, 1, 0
        self._eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            self.collectives += 1
            self.follow(None)
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for x in (result,) if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else ():
            if isinstance(x, Tensor) and x.is_floating_point() and (eps := torch.finfo(x.dtype).eps) > self._eps:
                self.narrowest, self._eps = x.dtype, eps
        for x in args:
            if isinstance(x, Tensor) and x.dim():
                self.reduction = max(self.reduction, *x.shape)
        return result


class _Recorder:
    """Takes the calls of modules into a recording."""

    def __init__(self, recording: Recording, watch: _Watch) -> None:
        self.recording, self.watch, self.counts = recording, watch, Counter[str]()
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

    def after(self, name: str) -> Callable[..., None]:
        """Return the hook of a module."""

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            started = self.started.pop() if self.started else 0
            if torch._C._current_autograd_node() is not None:  # pyright: ignore  (recomputed in backward)
                return
            if _infers_shapes():
                return
            inputs, outputs, watch = self._taken((args, kwargs)), self._taken(output), self.watch
            if not name and not self.counts[name]:
                self.recording.inputs = [_copied(x).double() for x in _tensors((args, kwargs)) if not x.is_complex()]
            collectives = started, watch.collectives
            call = Call(name, self.counts[name], inputs, outputs, watch.narrowest, watch.reduction, collectives)
            call.sources = self._sources((args, kwargs))
            for x in _tensors(output):
                if x.grad_fn is not None:
                    call.has_graph = True
                    self.makers.setdefault(x.grad_fn, []).append(len(self.recording.calls))
            self.recording.calls.append(call)
            self.counts[name] += 1

        return hook

    def _sources(self, values: Any) -> list[int]:
        """Return the calls behind some inputs: walk autograd's graph up to the first outputs of calls."""
        found, seen = set[int](), set[Any]()
        nodes = [x.grad_fn for x in _tensors(values)]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.makers:
                found.update(self.makers[node])
            else:
                nodes += [each for each, _ in node.next_functions]
        return sorted(found)

    def _taken(self, values: Any) -> list[int]:
        """Copy the floating-point tensors among some values, each once; return their indices."""
        found = []
        for x in _tensors(values):
            if not x.is_floating_point():
                continue
            known = self.known.get(id(x))
            if known is None or known[1] != x._version:
                self.known[id(x)] = known = x, x._version, len(self.recording.tensors)
                self.recording.tensors.append(_copied(x))
            found.append(known[2])
        return found


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
    """Yield the tensors among nested lists, tuples and mappings, as outputs of transformers are."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from _tensors(each)
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)


def record(
    case: Case,
    *,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    to: str | Path | None = None,
    follow: Callable[[str | None], None] | None = None,
) -> Recording:
    """Run the step of a case, and record it.

    Args:
        only, skip: patterns (``"layers.0.*"``) of the names of modules, as in the run of one process, whose inputs and
            outputs are recorded or not; parameters and gradients are recorded in any case.
        to: file to write the recording to, which ``Recording.load`` reads.
        follow: called with the name of every module that begins, and with None before every collective.

    Raises:
        ArgumentError: the case has no module, or two of its names are the same in the run of one process.
    """
    modules = case.modules
    if not modules:
        raise ArgumentError("verify.record: the case has no modules")
    found, watch = Recording(relations=dict(case.relations)), _Watch(follow)
    recorder, handles = _Recorder(found, watch), []
    # Of a wrapper and what it wraps, which may have one name, the inner one counts.
    for whole, module in {case.whole_module(name): module for name, module in modules.items()}.items():
        if whole is None:
            continue
        found.modules.append(whole)
        if (only is None or _matches(whole, only)) and not _matches(whole, skip):
            handles.append(module.register_forward_pre_hook(recorder.before(whole), prepend=True))
            handles.append(module.register_forward_hook(recorder.after(whole), with_kwargs=True))
    _take_parameters(case, found)
    try:
        with watch:
            loss = case.step()
    finally:
        for handle in handles:
            handle.remove()
    found.loss = None if loss is None else _copied(loss)
    found.narrowest, found.reduction = watch.narrowest, watch.reduction
    for name, parameter in case.parameters.items():
        if (whole := case.whole_name(name)) is not None:
            gradient = _as_held(case.gradient(parameter), parameter)
            found.gradients[whole] = None if gradient is None else _copied(gradient)
    if to is not None:
        Path(to).write_bytes(found.to_bytes())
    return found


def _as_held(gradient: Any, parameter: Any) -> Any:
    """Return a DTensor's gradient in the layout of its parameter, as optimizers see it: it may be of addends."""
    held = getattr(parameter, "placements", None)
    if held is None or getattr(gradient, "placements", held) == held:
        return gradient
    return gradient.redistribute(placements=held)


def _take_parameters(case: Case, found: Recording) -> None:
    """Copy the parameters into a recording, and note which are tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in case.parameters.items():
        whole = case.whole_name(name)
        if whole is None:
            continue
        if whole in found.parameters:
            raise ArgumentError(f"verify.record: two parameters are {whole!r} in the run of one process")
        found.parameters[whole] = _copied(case.value(parameter))
        if whole not in found.relations and (relation := _nested_split(parameter)) is not None:
            found.relations[whole] = relation
        names.setdefault(id(parameter), []).append(whole)
    found.tied = {each[0]: each for each in names.values() if len(each) > 1}


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
    splits: list[tuple[int, int, int]] = []
    for axis, placement in reversed(cut):
        # A strided shard was cut after those of the later axes: FSDP2 over tensor parallelism.
        at = len(splits) if hasattr(placement, "split_factor") else 0
        splits.insert(at, (placement.dim, mesh.size(axis), math.prod(mesh.shape[axis + 1 :])))
    return Relation(tuple(splits))


def _matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name is one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def draw(model: nn.Module, seed: int = 0) -> None:
    """Draw all floating-point parameters anew, so that none is zero, one or the same as another.

    Weights have the scale ``1 / sqrt(columns)``, other parameters are ``1 + 0.2 * normal`` if they were positive (the
    weights of norms), else ``0.2 * normal``. The same seed gives the same values.
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
