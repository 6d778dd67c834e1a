"""Losses of models: those of the shards of a sequence add up if each is what the model's loss function returned.

A loss function of transformers takes ``shift_labels`` and ``num_items_in_batch``, and is a sum over labels. The forward
is watched: what it hands to its loss function, what this returns, and whether that is the loss which comes out. Every
rank would add a further term, of its own shard; a formula of the model's own would shift the labels once more.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations.transformers.batch_notes import whole_of
from tritoncomm.integrations.transformers.loss_terms import forward_of, loss_terms, source_text
from tritoncomm.integrations.transformers.model_parts import outermost, outputs_of

__all__ = [
    "REFUSED_LOSS",
    "LossCall",
    "check",
    "end",
    "forget",
    "is_plain",
    "owners",
    "traced",
    "watch",
    "wrong_caller",
]

_ARGUMENTS = ("shift_labels", "num_items_in_batch")
REFUSED_LOSS = (
    "{label}: {problem}; here the loss has to be one sum over labels, which shards add up to. Leave labels out, and "
    "compute the loss from the logits of each position"
)
# Whether a loss function of somebody's is a sum: by the object that has it, and its function where it is a method.
_sums: "WeakKeyDictionary[Any, dict[Any, bool]]" = WeakKeyDictionary()


class LossCall(NamedTuple):
    """Call of a loss function, and what it returned.

    Attributes:
        version: of the loss; changes in place, as ``loss += term``, count it up. None where they are not looked for.
        kept: copy of the loss, where the source has changes to it.
    """

    loss: Any
    version: int | None
    kept: Tensor | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    function: Any


class _WatchedLoss:
    """Loss function of a model, while a forward runs.

    Attributes:
        owner: module whose hooks put it there.
        before: what the model had in this place; None for nothing.
        calls: so far.
    """

    def __init__(self, owner: nn.Module, model: nn.Module, before: Any, is_plain: bool) -> None:
        self.owner, self.before = owner, before
        self._model, self._is_plain = model, is_plain
        # A property of transformers warns where it is read, of models without a loss, too.
        self._function: Any = model.loss_function if _attribute(model) == "loss_function" else None
        self.calls: list[LossCall] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "calls": []}  # an interrupt may have left them, with their graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function: Any = self._function
        if function is None:
            current = vars(self._model).get(_attribute(self._model))  # this, or one inside of it
            _put(self._model, self.before)
            function = self._model.loss_function
            _put(self._model, current)
        loss = function(*args, **kwargs)
        function = function.calls[-1].function if isinstance(function, _WatchedLoss) else function
        call = LossCall(loss, None, None, args, kwargs, function)
        if not (self._is_plain and is_compiling()):
            call = traced(_with_version, self._is_plain)(call, self._is_plain)
        self.calls.append(call)
        return loss


def _with_version(call: LossCall, is_plain: bool) -> LossCall:
    """Note the version of a loss, and keep a copy of it unless nothing in the source changes it."""
    if not isinstance(call.loss, Tensor):
        return call
    return call._replace(version=call.loss._version, kept=None if is_plain else call.loss.detach().clone())


def traced(function: Callable[..., Any], is_plain: bool) -> Callable[..., Any]:
    """Return a function, for torch.compile one that breaks the graph where a loss may change in place."""
    return torch.compiler.disable(function) if is_compiling() and not is_plain else function


def is_plain(module: nn.Module) -> bool:
    """Whether a module, and those in it down to the model, are classes of packages without arithmetic on a loss."""
    packages = {type(part).__module__.partition(".")[0] for part in _around(module)}
    terms = [term for part in _around(module) for term in loss_terms(part) if "output_router_logits" not in term]
    return packages <= {"transformers", "peft", "torch"} and not terms and not _is_replaced(module)


def watch(
    owner: nn.Module, models: Iterable[nn.Module], is_plain: bool, is_running: Callable[[nn.Module], bool]
) -> None:
    """Watch the loss functions of models until ``end`` of the same owner.

    Args:
        is_plain: whether torch.compile may trace the watch; in a graph it does not see changes in place.
        is_running: whether a call of a module is on the stack. If not, an interrupt has left its watch.
    """
    for model in models:
        current = function = vars(model).get(_attribute(model))
        # Take off the watches of this owner, and those that an interrupt has left.
        while isinstance(function, _WatchedLoss) and (function.owner is owner or not is_running(function.owner)):
            function = function.before
        if function is not current:
            _put(model, function)  # a new watch reads the function that the model has
        _put(model, _WatchedLoss(owner, model, function, is_plain))


def end(models: Iterable[nn.Module], owner: nn.Module) -> "list[LossCall] | None":
    """End ``watch`` of an owner, and return the calls of the loss functions; None where it did not watch."""
    calls = None
    for model in models:
        watched = vars(model).get(_attribute(model))
        if isinstance(watched, _WatchedLoss) and watched.owner is owner:
            calls = [*(calls or ()), *watched.calls]
            _put(model, watched.before)
    return calls


def forget(modules: Iterable[nn.Module]) -> None:
    """Put back the loss functions that an interrupt kept ``end`` from putting back."""
    for module in modules:
        before = current = vars(module).get(_attribute(module))
        while isinstance(before, _WatchedLoss):
            before = before.before
        if before is not current:
            _put(module, before)


def check(
    owner: nn.Module, calls: "list[LossCall]", arguments: Mapping[str, Any], out: Any, is_sharded: bool, name: str
) -> None:
    """Reject the loss of a forward unless the losses of shards add up to it.

    Args:
        calls: calls of loss functions in the forward of ``owner``.
        arguments: keywords of the forward.
        out: what the forward returned.
        is_sharded: whether there are several ranks, of which each would add a further term of the loss.
        name: in ``register``, for errors.

    Raises:
        UnsupportedError: the loss is not what the model's loss function returned, or this is no sum over labels.
    """
    loss = _loss_of(out)
    if loss is None or (not calls and arguments.get("labels") is None):
        return
    if problem := _wrong_loss(owner, calls, arguments, loss, is_sharded):
        raise UnsupportedError(REFUSED_LOSS.format(label=name, problem=problem))


def owners(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules whose hooks watch the loss functions of some models."""
    for model in models:
        watched = vars(model).get(_attribute(model))
        while isinstance(watched, _WatchedLoss):
            yield watched.owner
            watched = watched.before


def _attribute(model: nn.Module) -> str:
    """Return the attribute by which one model gets another loss function."""
    is_property = isinstance(getattr(type(model), "loss_function", None), property)
    return "_loss_function" if is_property else "loss_function"


def _put(model: nn.Module, value: Any) -> None:
    """Give a model another loss function, or take it away for None."""
    name = _attribute(model)
    # A loss function that is a module stays where `nn.Module` keeps it, behind the attribute.
    if value is not None:
        object.__setattr__(model, name, value)
    elif any(child == name for child, _ in model.named_children()):
        object.__delattr__(model, name)
    else:
        delattr(model, name)  # torch.compile follows this


def _loss_of(out: Any) -> Tensor | None:
    """Return the loss in an output: ``out.loss``, ``out["loss"]``, the first of a tuple, or the output itself."""
    if isinstance(out, Mapping):
        loss = out.get("loss")
    elif isinstance(out, tuple | list) and not hasattr(out, "loss"):
        loss = out[0] if out and isinstance(out[0], Tensor) and out[0].dim() == 0 else None
    else:
        loss = out if isinstance(out, Tensor) and out.dim() == 0 else getattr(out, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _wrong_loss(
    owner: nn.Module, calls: list[LossCall], arguments: Mapping[str, Any], loss: Tensor, is_sharded: bool
) -> str | None:
    """Return the reason why the losses of shards do not add up to the loss of the sequence, or None."""
    kind = type(owner).__name__
    if not calls:  # whoever replaced a forward, as TRL's and Liger's fused heads do, took the labels as they come
        return None if _is_replaced(owner) else f"{kind} computes its loss by a formula of its own"
    for call in calls:
        if any(call.kwargs.get(name) is None for name in _ARGUMENTS):
            if any(arguments.get(name) is None for name in _ARGUMENTS):
                return f"{kind} got labels without {' and '.join(_ARGUMENTS)}, as shard_batch returns them"
            return f"{kind} hands no {' and '.join(_ARGUMENTS)} to its loss function"
        labels = call.kwargs.get("labels", call.args[1] if len(call.args) > 1 else None)
        handed = {**call.kwargs, "labels": labels}
        if any(not _is_same(handed[name], arguments.get(name)) for name in ("labels", *_ARGUMENTS)):
            return f"{kind} hands other labels, or another count of them, to its loss function than it got"
        name = getattr(call.function, "__module__", ""), getattr(call.function, "__name__", "")
        if name != ("transformers.loss.loss_utils", "ForCausalLMLoss"):
            # Asks for values, which torch.compile would trace.
            judge: Any = torch.compiler.disable(_wrong_function) if is_compiling() else _wrong_function
            if problem := judge(call):
                return f"{kind} has the loss {problem}"
    if is_sharded and _is_changed(calls, loss):
        terms = [term for module in _around(owner) for term in loss_terms(module)]
        first_term = f", {terms[0]}" if terms else ""
        return f"{kind} changes its loss by a further term{first_term}; every rank would add its own"
    return None


def _is_changed(calls: list[LossCall], loss: Tensor) -> bool:
    """Whether a loss is not the sum of what the loss function returned."""
    values: list[Any] = []
    for call in calls:
        is_untouched = call.version is None or call.loss._version == call.version
        if not is_untouched and call.kept is None:
            return True
        values.append(call.loss if is_untouched else call.kept)
    return not ((len(values) == 1 and values[0] is loss) or _is_same(sum(values), loss))


def _is_same(x: Any, wanted: Any) -> bool:
    """Whether a value is the one that was given; nothing given, or nothing handed on, is no difference."""
    if x is wanted or x is None or wanted is None or any(y is wanted for y in whole_of(x)):
        return True
    if not isinstance(x, Tensor) or not isinstance(wanted, Tensor):
        return bool(x == wanted)
    return x.shape == wanted.shape and torch.equal(x, wanted.detach().to(x.device, x.dtype))


def _is_sum(call: LossCall) -> bool:
    """Whether a loss function is a sum over the tokens of ``shift_labels``, as shards of a sequence need it.

    It is called again with the first four tokens of a call. Two things have to hold: other ``labels``, which it has to
    ignore beside ``shift_labels``, do not change the loss; and twice the tokens with the same ``num_items_in_batch``,
    by which alone it has to divide, double the loss.

    Args:
        call: a call of it, whose other arguments it gets again.
    """
    logits = call.kwargs["logits"] if "logits" in call.kwargs else call.args[0] if call.args else None
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.numel() == 0:
        return False
    shape = logits.shape[:2]
    count = min(logits.shape[1], 4)
    targets = torch.arange(count, device=logits.device)[None] % logits.shape[-1]

    def loss_of(times: int, labels: Tensor) -> Any:
        """Return the loss of the first four tokens with these labels, all of them ``times`` times."""

        def repeated(x: Any) -> Any:
            """Return the first tokens of a tensor with a value for each token, repeated."""
            is_of_tokens = isinstance(x, Tensor) and x.shape[:2] == shape
            if not is_of_tokens:
                return x
            first = x.detach()[:1, :count]
            return torch.cat([first.float() if x.is_floating_point() else first] * times, 1)

        args = [repeated(x) for x in call.args]
        kwargs = {name: repeated(x) for name, x in call.kwargs.items()}
        kwargs["shift_labels"] = torch.cat([targets] * times, 1)
        kwargs["num_items_in_batch"] = torch.tensor(count, device=logits.device)
        labels = torch.cat([labels] * times, 1)
        if len(args) > 1:
            args[1] = labels
        else:
            kwargs["labels"] = labels
        with torch.no_grad():
            return call.function(*args, **kwargs)

    loss = loss_of(1, targets)
    of_other_labels = loss_of(1, targets.flip(1))  # its ``shift_labels`` are the same
    of_twice_the_tokens = loss_of(2, targets)
    # fp32, whose sums of some values differ by less than 1e-5 of them.
    ignores_labels = torch.allclose(loss, of_other_labels, rtol=1e-5, atol=0)
    return ignores_labels and torch.allclose(2 * loss, of_twice_the_tokens, rtol=1e-5, atol=0)


def _wrong_function(call: LossCall) -> str | None:
    """Return the name of a loss function that is no sum over labels, with the reason, or None; asked once for each."""
    holder = getattr(call.function, "__self__", call.function)
    function = getattr(call.function, "__func__", None)  # a method is another object in every call
    name = getattr(call.function, "__name__", type(call.function).__name__)
    if function not in _sums.setdefault(holder, {}):
        try:
            _sums[holder][function] = _is_sum(call)
        except Exception as error:  # whatever it raises, nobody knows whether it is a sum
            return f"{name}, which raises {type(error).__name__} for four tokens: {error}"
    reason = "which is no sum over shift_labels, divided by num_items_in_batch"
    return None if _sums[holder][function] else f"{name}, {reason}"


def _is_replaced(owner: nn.Module) -> bool:
    """Whether somebody set a forward on the language model in a module, or in its class: it is not the class's own."""
    model: Any = outermost(owner.modules())
    name = getattr(inspect.unwrap(model.forward), "__qualname__", "")
    is_of_class = name in {f"{kind.__qualname__}.forward" for kind in type(model).__mro__}
    # One on the model may bear the name of the class's, as TRL's does, and so do wrappers for mixed precision.
    is_on_model = "forward" in vars(model) and "self.loss_function(" in source_text(forward_of(type(model)))
    is_language_model = any("CausalLM" in output or "LMHead" in output for output in outputs_of(model))
    return (is_on_model or not is_of_class) and is_language_model


def _around(owner: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it, down to the first model of transformers."""
    model = outermost(owner.modules())
    for module in owner.modules():
        yield module
        if module is model:
            return


def wrong_caller(module: nn.Module) -> str | None:
    """Return why the loss of a module without our hooks may be wrong over shards, or None if it cannot be.

    Such a module is around the one that ``switch`` got, or somebody calls its ``forward`` itself. It may be wrong if it
    does arithmetic on a loss, or if it is a model that computes its loss without ``self.loss_function``.
    """
    kind = type(module)
    if kind.__module__.startswith("torch."):
        return None
    # A router's loss is refused where its logits are asked for.
    terms = [term for term in loss_terms(module) if "output_router_logits" not in term]
    is_model = outermost([module]) is not None
    if not terms and (not is_model or "self.loss_function(" in source_text(forward_of(kind))):
        return None
    reason = f"does arithmetic on its loss, {terms[0]}" if terms else "has a formula of its own for its loss"
    remedy = "; give switch() the outermost module" if hasattr(module, "set_attn_implementation") else ""
    return f"{kind.__name__} {reason}, and is not watched{remedy}"
