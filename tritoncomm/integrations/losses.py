"""Losses of models: a loss that is one sum over labels is the sum of the losses of all shards of a sequence.

The source of a forward decides. ``self.loss_function(..., **kwargs)`` is such a sum, as it takes ``shift_labels`` and
``num_items_in_batch``. Formulas of a model's own are not, and every rank would add a further term by itself.
"""

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torch import nn

__all__ = ["further_term", "is_replaced", "wrong_loss"]

_Kind = Literal["sum", "unshifted", "super", "module", "factor", "other"]
_UNCHANGED = {"to", "mean", "float", "sum", "contiguous", "clone", "squeeze"}  # methods of a loss, which is one number


class _Addend(NamedTuple):
    """Part of a loss.

    Attributes:
        kind: a sum over labels; a loss function without shifted labels; the loss of the next class, or of a module
            that gets the labels; a factor of the loss; or another expression.
        node: the expression.
        guards: conditions under which it is added.
        module: name of the module.
        is_stored: whether it changes the loss of an output that another forward made.
    """

    kind: _Kind
    node: ast.expr
    guards: tuple[ast.expr, ...]
    module: str = ""
    is_stored: bool = False


class _Store(NamedTuple):
    """Value that is assigned, added or returned, and the conditions under which it is."""

    value: ast.expr
    guards: tuple[ast.expr, ...]


def wrong_loss(model: Any, arguments: Mapping[str, Any], is_sharded: bool = True) -> str | None:
    """Return the reason why the losses of shards do not add up to the loss of a model, or None.

    Args:
        arguments: of the forward by name, as conditions of further terms read them.
        is_sharded: whether there are several ranks; one rank adds a further term once.
    """
    return _wrong_loss(model, arguments, _forwards(model), is_sharded)


def further_term(module: nn.Module, arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why the forward of a module around a model changes its loss, or None."""
    for forward in _forwards(module)[:1]:
        return _wrong_addend(module, arguments, forward, _read(forward).addends)
    return None


def is_replaced(module: nn.Module) -> bool:
    """Whether somebody set a forward on a module or in its class: it is not the one in the source of the class."""
    return not _forwards(module)


def _wrong_loss(module: Any, arguments: Mapping[str, Any], forwards: list[Any], is_sharded: bool) -> str | None:
    """Judge the first of a module's forwards, and those that it hands the labels on to."""
    label = type(module).__name__
    if not forwards:
        return f"{label} computes no loss from labels"
    read = _read(forwards[0])
    addends = [addend for addend in read.addends if not _is_off(addend, module, arguments, forwards[0])]
    if problem := _wrong_addend(module, arguments, forwards[0], addends, is_sharded):
        return problem
    kinds = {addend.kind for addend in addends}
    if "sum" in kinds:
        return _wrong_function(module)
    if "unshifted" in kinds:
        return f"{label} hands no shift_labels and num_items_in_batch to its loss function"
    if "super" in kinds:
        return _wrong_loss(module, arguments, forwards[1:], is_sharded)
    for addend in addends:
        child = _child(module, addend.module)
        if child is not None:
            return None if is_replaced(child) else wrong_loss(child, arguments, is_sharded)
    return f"{label} hands no labels to a loss function"


def _wrong_function(module: Any) -> str | None:
    """Return the reason why the loss function of a model takes no shifted labels and no count of all ranks, or None."""
    function = module.loss_function
    name, parameters = getattr(function, "__name__", type(function).__name__), _parameters(function)
    if {"shift_labels", "num_items_in_batch"} <= set(parameters):
        return None
    if getattr(function, "__module__", "").startswith("transformers."):
        return f"{type(module).__name__} has the loss {name}, which shifts no labels"
    try:
        is_passed_on = any(word in inspect.getsource(function) for word in ("num_items_in_batch", "ForCausalLMLoss"))
    except (OSError, TypeError):
        is_passed_on = False
    return None if is_passed_on else f"{type(module).__name__} has the loss {name}, which takes no num_items_in_batch"


def _wrong_addend(
    module: Any, arguments: Mapping[str, Any], forward: Any, addends: list[_Addend], is_sharded: bool = True
) -> str | None:
    """Return the reason why an addend is neither a sum over labels nor the loss of another forward, or None."""
    label, right, wrong = type(module).__name__, [], []
    for addend in addends:
        is_method = addend.kind == "module" and _child(module, addend.module) is None
        if addend.kind == "factor":
            unknown = object()
            is_known = _Scope(module, arguments, forward).value_or(addend.node, unknown) is not unknown
            if is_sharded and not is_known and not _is_off(addend, module, arguments, forward):
                factor = ast.unparse(addend.node)
                return f"{label} multiplies its loss by {factor}, which each rank would compute of its own shard"
            continue
        if addend.kind != "other" and not is_method:
            right.append(addend)
        elif not _is_off(addend, module, arguments, forward):
            wrong.append(addend)
    for addend in wrong:
        text = ast.unparse(addend.node)
        if not right and not addend.is_stored:
            return f"{label} computes its loss by a formula of its own, {text}"
        if is_sharded:
            option = _name_of(addend)
            return f"{label} adds a further term to its loss by {option}, {text}, and every rank would add its own"
    return None


def _child(module: Any, name: str) -> nn.Module | None:
    """Return a module by its attribute, or by peft's ``get_base_model``; None where it is neither."""
    child = getattr(module, name, None)
    if name == "get_base_model" and callable(child):  # of peft
        child = child()
    return child if isinstance(child, nn.Module) else None


class _Read:
    """Loss of a forward, as its source has it.

    Attributes:
        rest: name of the parameter for other keywords; None without one.
        opaque: local names, and ``self.`` attributes, that the forward changes in another way than by one assignment.
        addends: of all that is returned as a loss.
        stored: addends that are written into an output's ``loss``.
    """

    def __init__(self, tree: ast.FunctionDef) -> None:
        arguments = tree.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        self._takes_labels, self.rest = "labels" in names, arguments.kwarg.arg if arguments.kwarg else None
        keys = {*names, *(_popped(node, self.rest) for node in ast.walk(tree))}
        self._taken = {"shift_labels", "num_items_in_batch"} & keys
        self._stores: dict[str, list[_Store]] = {}
        self._returns: list[_Store] = []
        self._attributes: list[_Store] = []
        self.opaque: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.AsyncFor | ast.NamedExpr | ast.comprehension):
                self._opaque(node.target)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._opaque(node.optional_vars)
        self._walk(tree.body, ())
        # Shifted labels take the place of the labels, whatever the forward made of these.
        self._changes_labels = any(not _is_same_labels(store.value) for store in self.stores("labels"))
        self.stored = [
            addend._replace(is_stored=True)
            for store in self._attributes
            for addend in self._addends(store.value, store.guards, frozenset())
        ]
        returned = [addend for store in self._returns for addend in self._returned(store.value, store.guards)]
        self.addends = [*returned, *self.stored]

    def stores(self, name: str) -> list[_Store]:
        """Return the assignments to a local name."""
        return self._stores.get(name, [])

    def _walk(self, body: list[ast.stmt], guards: tuple[ast.expr, ...]) -> None:
        """Collect assignments and returns with the conditions that they stand under."""
        for node in body:
            if isinstance(node, ast.If):
                inverse = ast.UnaryOp(ast.Not(), node.test)
                self._walk(node.body, (*guards, node.test))
                self._walk(node.orelse, (*guards, inverse))
                if isinstance(node.body[-1], ast.Return | ast.Raise):
                    guards = (*guards, inverse)
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                value = node.value
                if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div):
                    value = ast.BinOp(node.target, node.op, node.value)
                elif isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.Add | ast.Sub):
                    self._opaque(node.target)
                    continue
                for target in targets:
                    self._assign(target, value, guards)
            elif isinstance(node, ast.Return) and node.value is not None:
                self._returns.append(_Store(node.value, guards))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._statement(node.value, guards)
            elif isinstance(node, ast.Match):
                for case in node.cases:
                    self._walk(case.body, guards)
            else:
                for inner in ("body", "orelse", "finalbody"):
                    self._walk(getattr(node, inner, []), guards)
                for handler in getattr(node, "handlers", []):
                    self._walk(handler.body, guards)

    def _assign(self, target: ast.expr, value: ast.expr, guards: tuple[ast.expr, ...]) -> None:
        """Note an assignment; of tuples each element's."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for inner, part in zip(target.elts, value.elts, strict=True):
                self._assign(inner, part, guards)
        elif isinstance(target, ast.Name):
            self._stores.setdefault(target.id, []).append(_Store(value, guards))
        elif _is_loss(target):
            self._attributes.append(_Store(value, guards))
        else:
            self._opaque(target)

    def _opaque(self, target: ast.expr) -> None:
        """Note names and attributes of self whose values are not known before the forward runs."""
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and part.id != "self":
                self.opaque.add(part.id)
            elif isinstance(part, ast.Attribute) and _called_name(part) == f"self.{part.attr}":
                self.opaque.add(f"self.{part.attr}")

    def _statement(self, node: ast.Call, guards: tuple[ast.expr, ...]) -> None:
        """Note a call whose result nobody takes: ``loss.add_(term)``, ``setattr(out, "loss", value)``."""
        if not isinstance(node.func, ast.Attribute):
            if _called_name(node.func) == "setattr" and len(node.args) == 3 and ast.unparse(node.args[1]) == "'loss'":
                self._attributes.append(_Store(node.args[2], guards))
            return
        owner = node.func.value
        if node.func.attr.endswith("_") and node.args and (_is_loss(owner) or isinstance(owner, ast.Name)):
            is_sum = node.func.attr in ("add_", "sub_")
            value = node.args[0] if is_sum else ast.BinOp(owner, ast.Mult(), node.args[0])
            self._assign(owner, value, guards)
        elif _called_name(owner).startswith("self."):  # `self.terms.append(...)`
            self._opaque(owner)

    def _returned(
        self, node: ast.expr, guards: tuple[ast.expr, ...], seen: frozenset[str] = frozenset()
    ) -> Iterator[_Addend]:
        """Yield the addends of the loss in a returned value: an output, or a tuple that begins with it."""
        if isinstance(node, ast.IfExp):
            yield from self._returned(node.body, (*guards, node.test), seen)
            yield from self._returned(node.orelse, (*guards, ast.UnaryOp(ast.Not(), node.test)), seen)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield from self._returned(node.left, guards, seen)
        elif isinstance(node, ast.Tuple):
            yield from self._addends(node.elts[0], guards, frozenset()) if _mentions_loss(node.elts[:1]) else ()
        elif isinstance(node, ast.Call):
            losses = [keyword.value for keyword in node.keywords if keyword.arg == "loss"]
            if not losses and node.args and _mentions_loss(node.args[:1]):
                losses = node.args[:1]  # an output by position
            if losses:
                yield from self._addends(losses[0], guards, frozenset())
            else:
                yield from (addend for addend in self._addends(node, guards, frozenset()) if addend.kind != "other")
        elif isinstance(node, ast.Name) and node.id not in seen:
            for store in self.stores(node.id):
                yield from self._returned(store.value, (*guards, *store.guards), seen | {node.id})

    def _addends(self, node: ast.expr, guards: tuple[ast.expr, ...], seen: frozenset[str]) -> Iterator[_Addend]:
        """Yield the addends of an expression."""
        if isinstance(node, ast.Constant):
            return
        if isinstance(node, ast.Name) and node.id not in seen and self.stores(node.id):
            for store in self.stores(node.id):
                yield from self._addends(store.value, (*guards, *store.guards), seen | {node.id})
        elif isinstance(node, ast.Name) and node.id in seen:
            return  # `loss = loss + term`
        elif _is_loss(node) and isinstance(node, ast.Attribute | ast.Subscript):
            yield from (addend for addend in self._addends(node.value, guards, seen) if addend.kind != "other")
        elif isinstance(node, ast.IfExp):
            yield from self._addends(node.body, (*guards, node.test), seen)
            yield from self._addends(node.orelse, (*guards, ast.UnaryOp(ast.Not(), node.test)), seen)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            for side in (node.left, node.right):
                yield from self._addends(side, guards, seen)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            yield from self._product(node, guards, seen)
        elif isinstance(node, ast.Call):
            yield self._called(node, guards, seen) or _Addend("other", node, guards)
        else:
            yield _Addend("other", node, guards)

    def _product(self, node: ast.BinOp, guards: tuple[ast.expr, ...], seen: frozenset[str]) -> Iterator[_Addend]:
        """Yield the addends of a scaled loss, with its factor; of another product itself."""
        left, right = (list(self._addends(side, guards, seen)) for side in (node.left, node.right))
        is_loss = [
            any(addend.kind not in ("other", "factor") for addend in addends)
            or (isinstance(side, ast.Name) and side.id in seen)
            for side, addends in ((node.left, left), (node.right, right))
        ]
        if is_loss == [True, False]:
            yield from (*left, _Addend("factor", node.right, guards))
        elif is_loss == [False, True] and isinstance(node.op, ast.Mult):
            yield from (*right, _Addend("factor", node.left, guards))
        else:
            yield _Addend("other", node, guards)

    def _name_of_called(self, node: ast.expr) -> str:
        """Return the dotted name of a called function, also behind a local name of it."""
        name = _called_name(node)
        stores = self.stores(name) if isinstance(node, ast.Name) else []
        return _called_name(stores[0].value) if len(stores) == 1 else name

    def _called(self, node: ast.Call, guards: tuple[ast.expr, ...], seen: frozenset[str]) -> _Addend | None:
        """Return the addend of a call that hands labels on; None for another call."""
        name, keywords = self._name_of_called(node.func), {keyword.arg for keyword in node.keywords}
        rest = [keyword.value for keyword in node.keywords if keyword.arg is None]
        has_rest = any(isinstance(value, ast.Name) and value.id == self.rest for value in rest)
        # What a forward takes by name, or out of its keywords, it has to hand on by name.
        has_rest = (has_rest and self._taken <= keywords) or {"shift_labels", "num_items_in_batch"} <= keywords
        if name == "self.loss_function":
            return _Addend("sum" if has_rest and not self._changes_labels else "unshifted", node, guards)
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        has_labels = "labels" in names or (has_rest and not self._takes_labels)
        is_base = (
            name.endswith(".forward")
            and not name.startswith("self.")
            and [ast.unparse(argument) for argument in node.args[:1]] == ["self"]
        )
        if name in ("super.forward", "super.__call__") or is_base:
            return _Addend("super" if has_rest and not self._changes_labels else "unshifted", node, guards)
        owner, _, method = name.removeprefix("self.").partition(".")
        if name.startswith("self.") and method in ("", "forward", "__call__") and has_labels:
            return _Addend("module", node, guards, module=owner)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _UNCHANGED:
            inner = list(self._addends(node.func.value, guards, seen))
            if not inner and isinstance(node.func.value, ast.Name) and node.func.value.id in seen:
                return _Addend("factor", ast.Constant(1), guards)  # `loss = loss.to(...)`
            return inner[0] if len(inner) == 1 and inner[0].kind != "other" else None
        return None


def _popped(node: ast.AST, rest: str | None) -> str:
    """Return the key of ``kwargs.pop(key, ...)``; empty for another expression."""
    is_pop = isinstance(node, ast.Call) and _called_name(node.func) == f"{rest}.pop" and bool(node.args)
    key = node.args[0] if is_pop and isinstance(node, ast.Call) else None
    return str(key.value) if isinstance(key, ast.Constant) else ""


def _is_same_labels(node: ast.expr) -> bool:
    """Whether an expression is the labels, at most on another device or in other memory."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _UNCHANGED:
        node = node.func.value
    is_popped = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("pop", "get")
    return is_popped or isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id == "labels")


def _is_loss(node: ast.expr) -> bool:
    """Whether an expression is the loss of an output: ``outputs.loss``, ``outputs["loss"]`` or ``outputs[0]``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "loss"
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value in ("loss", 0)
        and isinstance(node.value, ast.Name)
    )


def _mentions_loss(nodes: list[ast.expr]) -> bool:
    return any("loss" in ast.unparse(node) for node in nodes)


def _called_name(node: ast.expr) -> str:
    """Return the dotted name of a called function, ``super.`` for ``super().``; empty for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and (not node.args or _called_name(node.func) == "super"):
        return _called_name(node.func)  # `super()`, `super(Class, self)`, `self.get_base_model()`
    if isinstance(node, ast.Attribute):
        inner = _called_name(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def _forwards(module: nn.Module) -> list[Any]:
    """Return the forwards of a module's classes in their order, without decorators.

    The list is empty where somebody set another forward on the module or in a class.
    """
    current: Any = inspect.unwrap(module.forward)
    current = getattr(current, "__func__", current)
    functions = []
    for kind in type(module).__mro__:
        if kind is nn.Module or "forward" not in vars(kind):
            continue
        function: Any = inspect.unwrap(vars(kind)["forward"])
        if getattr(function, "__qualname__", "") != f"{kind.__qualname__}.forward":
            break
        functions.append(function)
    return functions if functions and functions[0] is current else []


@lru_cache(maxsize=512)
def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; read once, as it takes longer than the rest of a check."""
    return inspect.signature(function).parameters


@lru_cache(maxsize=512)
def _read(forward: Any) -> _Read:
    """Return what the source of a forward says of its loss; of one without source, that it has none."""
    nothing = ast.parse("def forward(self): pass").body
    try:
        nodes = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError):
        nodes = nothing
    tree = next(node for node in (*nodes, *nothing) if isinstance(node, ast.FunctionDef))
    return _Read(tree)


def _is_off(addend: _Addend, module: Any, arguments: Mapping[str, Any], forward: Any) -> bool:
    """Whether a condition of an addend is known to be false, or a factor of a further term to be zero."""
    scope = _Scope(module, arguments, forward)
    if any(not scope.value_or(guard, True) for guard in addend.guards):
        return True
    if addend.kind != "other" or not isinstance(addend.node, ast.BinOp) or not isinstance(addend.node.op, ast.Mult):
        return False
    factors = (scope.value_or(node, None) for node in (addend.node.left, addend.node.right))
    return any(isinstance(factor, int | float) and factor == 0 for factor in factors)


class _Unknown(Exception):
    """An expression whose value is not known before the forward runs."""


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


class _Scope:
    """Names of a forward before it runs: the module, its arguments, and local names that follow from them.

    Only attributes, items, comparisons and ``getattr`` are evaluated, no other function is called.
    """

    def __init__(self, module: Any, arguments: Mapping[str, Any], forward: Any) -> None:
        self._module, self._arguments, self._read = module, arguments, _read(forward)
        self._globals, self._parameters = forward.__globals__, _parameters(forward)
        self._seen: set[str] = set()

    def value_or(self, node: ast.expr, default: Any) -> Any:
        """Return the value of an expression, or the default where it is not known."""
        try:
            return self._value(node)
        except Exception:  # also whatever reading attributes of somebody's module raises
            return default

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            if _called_name(node) in self._read.opaque:
                raise _Unknown
            return getattr(self._value(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return self._value(node.value)[self._value(node.slice)]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._value(node.operand)
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test) else node.orelse)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _COMPARISONS[type(node.ops[0])](self._value(node.left), self._value(node.comparators[0]))
        if isinstance(node, ast.BoolOp):
            return self._bool(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise _Unknown

    def _bool(self, node: ast.BoolOp) -> bool:
        """Evaluate ``and`` and ``or`` in any order, as one known operand may decide."""
        decisive = isinstance(node.op, ast.Or)
        unknown = object()
        values = [self.value_or(operand, unknown) for operand in node.values]
        if any(value is not unknown and bool(value) is decisive for value in values):
            return decisive
        if unknown in values:
            raise _Unknown
        return not decisive

    def _call(self, node: ast.Call) -> Any:
        """Evaluate ``getattr(x, name, ...)`` and ``kwargs.get(name, ...)``."""
        name, arguments = _called_name(node.func), node.args
        if name == "getattr" and len(arguments) > 1:
            owner, attribute = self._value(arguments[0]), self._value(arguments[1])
            return getattr(owner, attribute, *[self._value(default) for default in arguments[2:]])
        if name == f"{self._read.rest}.get" and arguments:
            key = self._value(arguments[0])
            if key in self._arguments:
                return self._arguments[key]
            return self._value(arguments[1]) if len(arguments) > 1 else None
        raise _Unknown

    def _name(self, name: str) -> Any:
        """Evaluate a name: an argument, a local one that is assigned once, an option of the config, or a global."""
        if name == "self":
            return self._module
        if self._arguments.get(name) is not None:
            return self._arguments[name]
        if name in self._read.opaque:
            raise _Unknown
        stores = self._read.stores(name)
        if stores and name not in self._seen:
            if len(stores) > 1:
                raise _Unknown
            self._seen.add(name)
            try:
                return self._value(stores[0].value)
            finally:
                self._seen.discard(name)
        if name in self._parameters:
            default = self._parameters[name].default
            is_given = default is not None and default is not inspect.Parameter.empty
            return default if is_given else getattr(getattr(self._module, "config", None), name, None)
        if name in self._globals:
            return self._globals[name]
        raise _Unknown


def _name_of(addend: _Addend) -> str:
    """Return the name of the option that adds a term: in its condition, else its factor."""
    for node in [*reversed(addend.guards), addend.node]:
        for part in ast.walk(node):
            name = part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else ""
            if name and name not in ("self", "labels", "loss", "config"):
                return name
    return "itself"
