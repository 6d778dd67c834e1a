"""Outputs of the ranks' modules against those of one process: the first module at fault."""

from dataclasses import dataclass

import torch

from tritoncomm.parsing import counted
from tritoncomm.verify import explanations
from tritoncomm.verify.bounds import Values, wide
from tritoncomm.verify.explanations import not_finite, ranks_in_words
from tritoncomm.verify.ledger import ALONE, INSIDE, OWN, Ledger, Problem, figures
from tritoncomm.verify.recording import ROOT, Call
from tritoncomm.verify.relations import Found, difference, find, is_telling
from tritoncomm.verify.runs import Recordings, is_inside

__all__ = ["Outputs"]


@dataclass
class _Wrong:
    """A call with a wrong output.

    Attributes:
        index: of the call in one process.
        call: in one process.
        problem: what the report says of it.
        has_right_inputs: whether none of its inputs is wrong, so that the fault is in it.
        is_repaired: whether a right call has inputs that were computed from it, and are right, too.
    """

    index: int
    call: Call
    problem: Problem
    has_right_inputs: bool
    is_repaired: bool = False


class Outputs:
    """The comparison of all outputs, in the order of the run in one process."""

    def __init__(self, runs: Recordings, ledger: Ledger) -> None:
        self.runs, self.ledger = runs, ledger
        self.whole, self.ranks, self.bounds = runs.whole, runs.ranks, runs.bounds

    def compare(self) -> None:
        """Find the relations of all outputs in the order of the run in one process, and add the first problem."""
        pending: list[tuple[Call, str]] = []  # outputs that are addends, of which no sum has been seen yet
        wrong: list[_Wrong] = []
        for index, call in enumerate(self.whole.calls):
            status, problem = self._compare_call(call, pending)
            if problem is not None:
                wrong.append(_Wrong(index, call, problem, self._has_right_inputs(call)))
                pending.clear()  # the problem is about them
            elif status:  # right, or addends: what is wrong inside of it was meant so
                harmless = [each for each in wrong if is_inside(each.call.name, call.name)]
                for each in harmless:
                    if each.has_right_inputs:
                        self.ledger.leave(INSIDE, each.call.name)
                wrong = [each for each in wrong if each not in harmless]
                if harmless:  # and so were addends inside of it
                    pending = [each for each in pending if each[0] is call]
                if status == "fits":
                    self._note_repairs(wrong, call)
        if (problem := self._first(wrong)) is None:
            for each in wrong:
                if each.has_right_inputs:
                    self.ledger.leave(INSIDE, each.call.name)
            problem = self._never_summed(pending)
        if problem is not None:
            self.ledger.problems.append(problem)

    def _has_right_inputs(self, call: Call) -> bool:
        """Whether no input of a call is wrong, as far as it can be compared."""
        present = self.runs.present(call)
        return bool(present) and self._wrong_input(call, present) is None

    def _note_repairs(self, wrong: list[_Wrong], call: Call) -> None:
        """Mark wrong outputs from which an input of a right call was computed: masked lookups, tokens put in order."""
        inputs = [index for index in call.inputs.values() if is_telling(self.whole.tensors[index])]
        if not inputs or not self._has_right_inputs(call):
            return
        sources = set(call.sources)
        for each in reversed(wrong):
            if each.index in sources:
                each.is_repaired = True
                sources.update(each.call.sources)  # what it was computed from was wrong on the same way

    @staticmethod
    def _first(wrong: list[_Wrong]) -> Problem | None:
        """Return the problem of the first module at fault; None if what the wrong ones returned was repaired."""
        open_ones = [each for each in wrong if not each.is_repaired]
        if not open_ones:
            return None
        # A module at fault has right inputs. A module inside of it says more: one that is at fault itself, or one whose
        # input the code between the modules made wrong.
        chosen = next((each for each in open_ones if each.has_right_inputs), open_ones[0])
        inside = [each for each in open_ones if each is chosen or is_inside(each.call.name, chosen.call.name)]
        first = inside[0]
        # If the input of a module around it is wrong, too, that one is blamed.
        for each in open_ones:
            if not (first.has_right_inputs or each.has_right_inputs) and is_inside(first.call.name, each.call.name):
                first = each
        return first.problem

    def _never_summed(self, pending: list[tuple[Call, str]]) -> Problem | None:
        """Return the problem of a step that ends with addends which are no loss."""
        if not pending or pending[-1][0] is not self.whole.calls[-1]:
            return None
        call, reason = pending[0]
        if not any(self.whole.tensors[i].dim() for i in call.outputs):
            return None
        return Problem(call.name, f"{call.name or ROOT}: the ranks' parts were never summed ({reason})")

    def _compare_call(self, call: Call, pending: list[tuple[Call, str]]) -> tuple[str, Problem | None]:
        """Compare one call; return ``fits``, ``partial`` or "" if it says nothing, and the problem of a wrong one."""
        self.ledger.counts["outputs"] += len(call.outputs)
        holders, present = self.runs.with_module(call.name), self.runs.present(call)
        if not present:
            if call.number == 0 and call.outputs:
                self.ledger.leave(ALONE, call.name)
            self.ledger.counts["alone"] += len(call.outputs)
            return "", None
        expected = self.runs.whole_times[call.name]
        if len(present) < len(holders) or any(self.runs.times[rank][call.name] != expected for rank, _ in present):
            return "", Problem(call.name, self._words_of_times(call, holders))
        status = ""
        for j, index in enumerate(call.outputs):
            if any(j >= len(each.outputs) for _, each in present):
                self.ledger.counts["alone"] += 1
                self.ledger.leave("no output of as many", call.name)
                continue
            whole = self.whole.tensors[index]
            parts = [self.ranks[rank].tensors[each.outputs[j]] for rank, each in present]
            self.ledger.count("outputs")
            values = Values.of(whole, parts, self.bounds.of_output(call, j))
            if not is_telling(whole):
                self.ledger.counts["ambiguous"] += 1
                if not_finite(values, range(len(parts))):
                    return "", self._blamed(call, present, pending, find(*values), values)
                continue
            fit = find(*values, known=self.runs.declared(call.name), allow_strides=self.runs.has_strides)
            if self.ledger.is_unchecked(self.bounds.exact_output(call, j), values, fit, "outputs", call.name):
                continue
            # Ranks that each run other layers inside of a module are stages, whose outputs are no parts of its own.
            if fit.relation is None and self._is_divided(call.name) and self._are_stages(values, present):
                self.ledger.leave(OWN, call.name)
                return "", None
            relation = self.ledger.relation(fit, f"the output of {call.name or ROOT}", whole, len(parts))
            if relation is None:
                return "", self._blamed(call, present, pending, fit, values)
            if relation.is_partial and not relation.is_mean:
                pending.append((call, str(relation)))
                status = status or "partial"
            else:
                status = "fits"
        if status == "fits":
            pending.clear()
        return status, None

    def _is_divided(self, name: str) -> bool:
        """Whether ranks have different modules inside of one, as a pipeline's stages have: its outputs differ, too."""
        every = set().union(*(run.modules for run in self.ranks))
        holders = [set(run.modules) for run in self.ranks if name in run.modules]
        return any(is_inside(inner, name) for modules in holders for inner in every - modules)

    def _are_stages(self, values: Values, present: list[tuple[int, Call]]) -> bool:
        """Whether every rank's output is the whole one or what the last module inside returned, as of stages it is."""
        whole, parts, bound = values
        for (rank, call), part in zip(present, parts, strict=True):
            inner = {i for run in self.ranks[rank].calls if is_inside(run.name, call.name) for i in run.outputs}
            tensors = self.ranks[rank].tensors
            if (part.shape != whole.shape or difference(part, whole) > bound) and not any(
                tensors[i].shape == part.shape and torch.equal(wide(tensors[i]), part) for i in inner
            ):
                return False
        return True

    def _blamed(
        self,
        call: Call,
        present: list[tuple[int, Call]],
        pending: list[tuple[Call, str]],
        fit: Found,
        values: Values,
    ) -> Problem:
        """Return the problem of a wrong output: of its module, of what computed its input, or of addends before."""
        size = figures(fit, values)
        if pending:
            return self._blamed_addends(call, present, pending[0], size)
        where = self._wrong_input(call, present)
        if where is not None and not call.name:
            return Problem("", f"{ROOT}: {where} is no part of the whole one ({size})")
        if where is not None:
            parent = self.runs.around(call.name)
            line = f"{parent or ROOT}: what it computes between its modules is wrong: {where} of {call.name}"
            return Problem(parent, f"{line} ({size})")
        bias = self.whole.parameters.get(f"{call.name}.bias")
        calls = [call, *(each for _, each in present)]
        reason = explanations.of_output(values, [rank for rank, _ in present], fit.nearest, bias, calls)
        shapes = f" of shape {list(values.whole.shape)}, here {[list(x.shape) for x in values.parts]}"
        line = f"{call.name or ROOT}: its output{'' if fit.nearest is not None else shapes} is no part of the whole one"
        return Problem(call.name, f"{line}{reason} ({size})")

    def _blamed_addends(
        self, call: Call, present: list[tuple[int, Call]], addends: tuple[Call, str], size: str
    ) -> Problem:
        """Return the problem of a wrong output behind addends: nobody sent anything, or what was made of the sum."""
        culprit, reason = addends
        sent = 0
        for rank, each in present:
            before = self.runs.calls[rank].get((culprit.name, culprit.number))
            if before is not None:
                # Collectives behind the culprit: until the end of the call if it is inside of this one, else its start.
                started, ended = each.collectives
                until = ended if is_inside(culprit.name, call.name) else started
                sent = max(sent, until - before.collectives[1])
        behind = f"{call.name or ROOT} is wrong ({size})"
        if not sent:
            line = f"{culprit.name or ROOT}: the ranks' parts were never summed ({reason}); {behind}"
            return Problem(culprit.name, line)
        parent = self.runs.around(culprit.name)
        made = f"what it makes of the {reason} of {culprit.name}, with {counted(sent, 'collective')}, is wrong"
        line = f"{parent or ROOT}: {made}; {behind}"
        return Problem(parent, line)

    def _wrong_input(self, call: Call, present: list[tuple[int, Call]]) -> str | None:
        """Return in words the input of a call that is wrong already; None if none is."""
        for key, index in call.inputs.items():
            whole = wide(self.whole.tensors[index])
            if not is_telling(whole) or any(key not in each.inputs for _, each in present):
                continue
            parts = [self.ranks[rank].tensors[each.inputs[key]] for rank, each in present]
            values = Values.of(whole, parts, self.bounds.of_input(call, key))
            if find(*values, allow_strides=self.runs.has_strides).relation is None:
                reason = explanations.repeated(values)
                return (f"input {key}" if len(call.inputs) > 1 else "the input") + (f" ({reason})" if reason else "")
        return None

    def _words_of_times(self, call: Call, holders: list[int]) -> str:
        """Say on which ranks a module ran how often."""
        expected = self.runs.whole_times[call.name]
        times = {rank: self.runs.times[rank].get(call.name, 0) for rank in holders}
        never = [rank for rank, count in times.items() if not count]
        if never:
            return f"{call.name or ROOT}: never ran on {ranks_in_words(never)}"
        other = next(rank for rank, count in times.items() if count != expected)
        return f"{call.name or ROOT}: ran {times[other]} times on rank {other}, {expected} times in one process"
