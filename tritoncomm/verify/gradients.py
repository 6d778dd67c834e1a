"""Comparison of what backward and the optimizer made: gradients, changes of parameters and buffers, the loss."""

import torch

from tritoncomm.verify import explanations
from tritoncomm.verify.bounds import Values, wide
from tritoncomm.verify.explanations import factor_of, not_finite, ranks_in_words
from tritoncomm.verify.ledger import ALONE, OWN, Ledger, Problem, figures
from tritoncomm.verify.recording import ROOT, Call
from tritoncomm.verify.relations import Relation, difference, find, is_telling
from tritoncomm.verify.runs import Recordings

__all__ = ["Gradients"]

_STEP = "the step"  # where no module is at fault


class Gradients:
    """The comparison of what a step makes of its outputs.

    Attributes:
        held: relations of the parameters, which their gradients and changes have, too.
    """

    def __init__(self, runs: Recordings, ledger: Ledger, held: dict[str, Relation]) -> None:
        self.runs, self.ledger, self.held = runs, ledger, held
        self.whole, self.ranks, self.bounds = runs.whole, runs.ranks, runs.bounds

    def compare(self) -> None:
        """Compare gradients with the parts that the parameters are."""
        # As backward goes: a wrong gradient makes those of earlier modules wrong. A parameter counts with the first
        # call of its module or of one inside of it, whichever was recorded first.
        first_call: dict[str, int] = {}
        for i, call in enumerate(self.whole.calls):
            parts = call.name.split(".") if call.name else []
            for depth in range(len(parts) + 1):
                first_call.setdefault(".".join(parts[:depth]), i)
        place = {name: first_call.get(name.rpartition(".")[0], -1) for name in self.whole.gradients}
        # The gradient of a tied parameter is whole when backward has passed the first module that uses it.
        whole_at = place | {
            name: min(place[each] for each in names) for names in self.whole.tied.values() for name in names
        }
        for name in sorted(self.whole.gradients, key=lambda name: (-whole_at[name], -place[name])):
            self._compare_gradient(name)
        if not all(map(self.runs.holders, self.whole.parameters)):
            return  # a name without a partner here may be one without a partner there
        for name in self.runs.on_ranks_alone():
            gradients = [run.gradients.get(name) for run in self.ranks]
            if training := [rank for rank, x in enumerate(gradients) if x is not None and bool((x != 0).any())]:
                where = ranks_in_words(training)
                line = f"parameter {name} has a gradient on {where}, and one process has no such parameter"
                self.ledger.add(name.rpartition(".")[0], line)

    def _compare_gradient(self, name: str) -> None:
        """Compare one gradient; zeros and none are the same, as they are to an optimizer without decay."""
        recorded, holders = self.whole.gradients[name], self.runs.holders(name)
        whole = torch.zeros_like(self.whole.parameters[name]) if recorded is None else recorded
        gradients = [self.ranks[rank].gradients.get(name) for rank in holders]
        is_zero = not bool((whole != 0).any())
        self.ledger.counts["gradients"] += recorded is not None
        if name not in self.held or not holders:
            self.ledger.counts["alone"] += recorded is not None
            return
        if recorded is not None:
            self.ledger.count("gradients")
            self.ledger.counts["ambiguous"] += is_zero
        module, missing = name.rpartition(".")[0], [r for r, x in zip(holders, gradients, strict=True) if x is None]
        if missing and not is_zero:
            self.ledger.add(module, f"gradient of {name} is None on {ranks_in_words(missing)}")
            return
        parts = [
            torch.zeros_like(self.ranks[rank].parameters[name]) if x is None else x
            for rank, x in zip(holders, gradients, strict=True)
        ]
        exact = None if recorded is None else self.bounds.exact_gradient(name)
        values = Values.of(whole, parts, self.bounds.of_gradient(whole, parts, exact))
        relation = self.runs.declared(f"gradient {name}") or self.held[name]
        fit = find(*values, known=relation)
        if recorded is not None and self.ledger.is_unchecked(exact, values, fit, "gradients", name):
            return
        if fit.relation is not None:
            return
        reason = not_finite(values, holders)
        if not reason and is_zero:
            having = [rank for rank, x in zip(holders, parts, strict=True) if bool((x != 0).any())]
            in_one_process = "is zero" if recorded is not None else "is not there"
            reason = f"{in_one_process} in one process, and not zero on {ranks_in_words(having)}"
        reason = reason or explanations.of_gradient(name, values, holders, relation, self.whole, self.ranks)
        self.ledger.add(module, f"gradient of {name} {reason} ({figures(fit, values)})")

    def blame_on_step(self) -> Problem | None:
        """Return what the gradients of outputs say of wrong gradients of parameters, where no module is at fault."""
        runs = [self.whole, *self.ranks]
        if not self.ledger.problems or not all(run.backward for run in runs):
            return None
        right = 0
        for call in reversed(self.whole.calls):  # as backward goes
            for j, index in enumerate(call.outputs):
                # The ranks on which it is wrong; None if it says nothing.
                wrong = self._wrong_backward(call, j) if index in self.whole.backward else None
                if wrong and not right:
                    reason = f"the gradient of its output is wrong on {ranks_in_words(wrong)}"
                    return Problem(_STEP, f"{_STEP}: between {call.name or ROOT} and the loss: {reason}")
                if wrong:
                    return None
                if wrong is not None:
                    right += 1
        # One module may compute a wrong gradient of its parameters alone; none makes those of all wrong.
        unchecked = {name for names in self.ledger.left.values() for name in names}
        telling = [
            name
            for name, x in self.whole.gradients.items()
            if x is not None and is_telling(x) and f"gradient {name}" not in unchecked
        ]
        is_all = len(self.ledger.problems) == len(telling)
        if not right or not is_all or " is wrong" not in self.ledger.problems[0].line:
            return None
        reason = "gradients of outputs are right, and those of all parameters are wrong"
        return Problem(_STEP, f"{_STEP}: after the last module: {reason}")

    def _wrong_backward(self, call: Call, j: int) -> list[int] | None:
        """Return the ranks on which the gradient of an output is no multiple of that in one process; None if unknown.

        A rank's loss may be a mean over what it has, or a share of the whole one, so each may have a factor of its own.
        """
        whole, present = wide(self.whole.backward[call.outputs[j]]), self.runs.present(call)
        if not is_telling(whole) or any(
            j >= len(each.outputs) or each.outputs[j] not in self.ranks[rank].backward for rank, each in present
        ):
            return None
        outputs = [self.ranks[rank].tensors[each.outputs[j]] for rank, each in present]
        values = Values.of(self.whole.tensors[call.outputs[j]], outputs, self.bounds.of_output(call, j))
        relation = find(*values, known=self.runs.declared(call.name), allow_strides=self.runs.has_strides).relation
        if relation is None:
            return None
        wrong = []
        for (rank, each), expected in zip(present, relation.parts(whole, values.parts), strict=True):
            x = wide(self.ranks[rank].backward[each.outputs[j]])
            if expected is None or expected.shape != x.shape:
                return None
            square = float((expected * expected).sum())
            factor = float((x * expected).sum()) / square if square else 0.0
            if difference(x, factor * expected) > self.bounds.of_backward(x) or (square and factor <= 0):
                wrong.append(rank)
        return wrong

    def compare_changed(self) -> None:
        """Compare what the step has changed: parameters, by their changes, and buffers."""
        for name in (*self.whole.parameters, *self.whole.buffers):
            if any(name in run.changed for run in (self.whole, *self.ranks)):
                self.ledger.counts["changed"] += 1
                if name in self.held:
                    self._compare_change(name, self.held[name])
                elif name in self.whole.buffers:
                    self._compare_buffer(name)

    def _compare_change(self, name: str, relation: Relation) -> None:
        """Compare the change of a parameter, where its gradient is more than rounding: Adam divides by its size."""
        holders = self.runs.holders(name)
        whole = self.bounds.change(name)
        runs = [self.ranks[rank] for rank in holders]
        parts = [wide(run.changed.get(name, run.parameters[name])) - wide(run.parameters[name]) for run in runs]
        bound, is_known = self.bounds.of_change(name, whole)
        for k, mask in enumerate(relation.parts(is_known, parts)):
            if mask is not None and mask.shape == parts[k].shape:
                parts[k] = parts[k] * mask
        values = Values(whole * is_known, parts, bound)
        self.ledger.count("changed")
        fit = find(*values, known=relation)
        if name in self.whole.changed and self.ledger.is_unchecked(
            exact=None, values=values, fit=fit, kind="changed", name=name
        ):
            return
        if fit.relation is not None:
            return
        if name in self.whole.changed:
            reason = not_finite(values, holders)
            reason = reason or explanations.of_gradient(name, values, holders, relation, self.whole, self.ranks)
        else:
            reason = "is not in one process"  # where the step does not change the parameter
        module, line = name.rpartition(".")[0], f"parameter {name} after the step: its change {reason}"
        self.ledger.add(module, f"{line} ({figures(fit, values)})")

    def _compare_buffer(self, name: str) -> None:
        """Compare a buffer after the step: a part of the whole one, or addends, as counts of tokens are."""
        whole = self.whole.changed.get(name, self.whole.buffers[name])
        holders = [rank for rank, run in enumerate(self.ranks) if name in run.buffers]
        parts = [self.ranks[rank].changed.get(name, self.ranks[rank].buffers[name]) for rank in holders]
        if not parts:
            self.ledger.leave(ALONE, name)
            self.ledger.counts["alone"] += 1
            return
        values = Values.of(whole, parts, self.bounds.of_buffer(whole))
        fit = find(*values)
        reason = not_finite(values, holders)
        if fit.relation is None and fit.nearest is None and not reason:  # no shape fits: a buffer of the rank's own
            self.ledger.leave(OWN, name)
            return
        self.ledger.count("changed")
        if fit.relation is None:
            reason = reason or explanations.of_output(values, holders, fit.nearest)
            line = f"buffer {name} after the step is no part of the whole one{reason} ({figures(fit, values)})"
            self.ledger.add(name.rpartition(".")[0], line)

    def compare_loss(self) -> None:
        """Compare the losses that the steps returned: each the whole one, its mean or its addends."""
        whole, parts = self.whole.loss, [run.loss for run in self.ranks if run.loss is not None]
        if whole is None or not parts:
            return
        # A loss of 0 fits every relation, so that it is compared only where a rank's is not finite.
        if not is_telling(whole) and all(bool(x.isfinite().all()) for x in parts):
            return
        self.ledger.count("loss")
        self.ledger.counts["outputs"] += 1  # the report counts a loss among the outputs
        values = Values.of(whole, parts, self.bounds.of_loss(whole))
        if find(*values).relation is None:
            losses = ", ".join(f"{float(x.mean()):.6g}" for x in parts)
            is_like = all(x.shape == whole.shape for x in parts)
            factor_text = factor_of(values.parts, [values.whole] * len(parts), values.bound) if is_like else None
            reason = factor_text or "neither equal nor its mean or addends"
            self.ledger.add("", f"the loss is {float(whole.mean()):.6g}, here {losses}: {reason}")
