"""One training step of a model, recorded: inputs and outputs of every module, parameters and gradients."""

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from tritoncomm.verify.names import partners
from tritoncomm.verify.relations import Relation

__all__ = ["ROOT", "Call", "Case", "Recording", "gradient_of", "plain"]

ROOT: Final = "the model"


def plain(x: Tensor) -> Tensor:
    """Return this rank's values as an ordinary tensor without a graph: the local part of a DTensor or ColoTensor."""
    x = x.detach()
    if hasattr(x, "to_local"):
        x = x.to_local()  # pyright: ignore
    if hasattr(x, "wait"):  # a functional collective's result in flight
        x = x.wait()  # pyright: ignore
    return x if type(x) is Tensor else x.as_subclass(Tensor)


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
            mapping keeps names that it does not have. A module ``a`` is looked up as ``a.``, too. What torch's wrappers
            and peft add to names is taken off without it, where the name has a partner then.
        gradient: returns the gradient of a parameter, by default ``main_grad``, then ``grad``.
        value: returns the values of a parameter, by default its own; for programs that keep them elsewhere (ZeRO-3).
        relations: what ranks hold of a tensor where the search cannot know, by name or pattern (``"*.qkv.weight"``):
            of a parameter and its gradient, or of a module's outputs. ``"gradient *"`` is for gradients alone: they may
            be addends of several ranks only where this says so.
    """

    model: nn.Module | Sequence[nn.Module]
    step: Callable[[], Tensor | None]
    rename: Callable[[str], str | None] | Mapping[str, str | None] = field(default_factory=dict)
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
        return self._named("named_parameters")

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every buffer by its name in this program."""
        return self._named("named_buffers")

    def _named(self, method: str) -> dict[str, Any]:
        """Return parameters or buffers by name; those of several chunks begin with their number."""
        if isinstance(self.model, nn.Module):
            return dict(getattr(self.model, method)(remove_duplicate=False))
        chunks = enumerate(self.model)
        return {f"{i}.{name}": x for i, chunk in chunks for name, x in getattr(chunk, method)(remove_duplicate=False)}

    def whole_name(self, name: str) -> str | None:
        """Return the name of a parameter in the run of one process; None if it is not compared."""
        return self.rename(name) if callable(self.rename) else self.rename.get(name, name)

    def whole_module(self, name: str) -> str | None:
        """Return the name of a module in the run of one process; None if it is not compared."""
        if not callable(self.rename):
            prefixes = (
                new.removesuffix(end)
                for old, new in self.rename.items()
                if old.startswith(f"{name}.") and new is not None and new.endswith(end := old.removeprefix(f"{name}."))
            )
            return self.rename.get(name, next((each.rstrip(".") for each in prefixes), name))
        renamed = self.rename(f"{name}.") if name else self.rename(name)
        return None if renamed is None else renamed.rstrip(".")


@dataclass
class Call:
    """One forward of a module.

    Attributes:
        name: of the module in the run of one process.
        number: of this call among those of the module, from 0.
        inputs: indices of tensors in ``Recording.tensors``, by the names in the signature of ``forward``.
        outputs: indices of tensors in ``Recording.tensors``.
        narrowest: narrowest floating-point dtype that any operator had produced by the end of the call.
        reduction: most addends of an operator until then.
        collectives: calls of a backend in the step before it began, and by its end.
        sources: indices of the calls in ``Recording.calls`` from whose outputs its inputs were computed, without a call
            between: as far as autograd's graph and the operators that ran show.
    """

    name: str
    number: int
    inputs: dict[str, int]
    outputs: list[int]
    narrowest: torch.dtype
    reduction: int
    collectives: tuple[int, int]
    sources: list[int] = field(default_factory=list)


@dataclass
class Recording:
    """Record of one step on one rank, or in one process; made by ``record``.

    Attributes:
        calls: of modules, in the order in which they ended.
        tensors: inputs and outputs of the calls, each once.
        parameters, gradients: by their names in the run of one process; a gradient may be None.
        tied: for a parameter that has several names all of them, by the first.
        inputs: floating-point and integer tensors that the model was first called with, in float64, by their names in
            the signature of its ``forward``.
        loss: what the step returned.
        narrowest, reduction: over the whole step.
        modules: names of all modules, called or not.
        relations: of the case.
        noise: attributes that draw random numbers, in words.
        exact: the same step in float64, for a step in 16 bits: the distance of the two is what rounding does. Where the
            ranks have one, too, they are compared as well, and more closely.
        has_autocast: whether a module was called under autocast.
        buffers: before the step, by their names in the run of one process.
        changed: parameters and buffers that the step changed, after it.
        accumulated: gradients as backward left them last, which the step may have deleted since.
        backward: gradients of outputs by their indices in ``tensors``, where they were asked for.
    """

    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    narrowest: torch.dtype = torch.float64
    reduction: int = 1
    modules: list[str] = field(default_factory=list)
    relations: dict[str, Relation] = field(default_factory=dict)
    noise: list[str] = field(default_factory=list)
    exact: "Recording | None" = None
    has_autocast: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    accumulated: dict[str, Tensor] = field(default_factory=dict)
    backward: dict[int, Tensor] = field(default_factory=dict)

    def renamed(self, whole: "Recording") -> "Recording":
        """Return the recording with the names of one process, where wrappers have made other names of them."""
        modules = partners(whole.modules, self.modules)
        tensors = partners((*whole.parameters, *whole.buffers), (*self.parameters, *self.buffers))
        names = {name: new or name for name, new in tensors.items()}  # without a partner a tensor keeps its name
        if all(name == new for name, new in (modules | names).items()):
            return self
        # A module whose partner is None is a wrapper, and its calls are left out.
        kept = [i for i, call in enumerate(self.calls) if modules.get(call.name, call.name) is not None]
        places = {old: new for new, old in enumerate(kept)}
        calls = [
            dataclasses.replace(
                self.calls[i],
                name=modules.get(self.calls[i].name, self.calls[i].name),
                sources=[places[each] for each in self.calls[i].sources if each in places],
            )
            for i in kept
        ]
        return dataclasses.replace(
            self,
            calls=calls,
            modules=[new for new in modules.values() if new is not None],
            parameters={names[name]: x for name, x in self.parameters.items()},
            gradients={names[name]: x for name, x in self.gradients.items()},
            buffers={names[name]: x for name, x in self.buffers.items()},
            changed={names[name]: x for name, x in self.changed.items()},
            tied={names[name]: [names[each] for each in same] for name, same in self.tied.items()},
            relations={names.get(name, name): relation for name, relation in self.relations.items()},
        )

    @property
    def is_rounded(self) -> bool:
        """Whether an operator of the step had a result in 16 bits or fewer."""
        return torch.finfo(self.narrowest).eps > torch.finfo(torch.float32).eps

    @property
    def is_wide(self) -> bool:
        """Whether all tensors of the recording are in float64."""
        values = (*self.tensors, *self.parameters.values(), *self.gradients.values(), *self.changed.values())
        return all(torch.finfo(x.dtype).eps <= torch.finfo(torch.float64).eps for x in values
                   if x is not None and (x.is_floating_point() or x.is_complex()))  # fmt: skip

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
