"""Losses over sequence shards: right where they are what the loss function returned, and otherwise refused by name."""

import copy
import functools
import importlib.util
import pickle
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations import transformers as ours

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
        import transformers.loss.loss_utils

        transformers.logging.set_verbosity_error()
        return transformers


def classes() -> dict[str, tuple[type, str]]:
    """Return classes of one's own by name, with the words that they are refused with; "" for those that are right."""
    transformers = library()
    llama, output = transformers.LlamaForCausalLM, transformers.modeling_outputs.CausalLMOutputWithPast

    def with_term(forward: Any) -> Any:
        def decorated(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = forward(self, *args, **kwargs)
            out.loss = out.loss + out.logits.pow(2).mean()
            return out

        return decorated

    class Plain(llama): ...

    class Passed(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **dict(**kwargs))

    class Penalised(llama):
        alpha = 0.1

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if self.alpha > 0 and out.loss is not None:
                out.loss += self.alpha * self.lm_head.weight.pow(2).mean()
            return out

    class Off(Penalised):
        alpha = 0

    class Zero(llama):
        weight = 0.0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            weight = self.weight
            return output(loss=out.loss + weight * out.logits.mean(), logits=out.logits)

    class Weighted(Zero):
        weight = 2.0

    class Tuple(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            loss = out.loss
            loss = loss + self.config.penalty * out.logits.mean()
            return (loss,) + (out.logits,)

    class Plainly(llama):  # a tuple
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs, return_dict=False)

    class Helped(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            self.regularise(out)
            return out

        def regularise(self, out: Any) -> None:
            out["loss"] = out["loss"] - out.logits.logsumexp(-1).mean()

    class Decorated(llama):
        forward = with_term(llama.forward)

    class Wrapped(llama):
        forward = functools.wraps(llama.forward)(with_term(llama.forward))

    class Named(llama):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, position_ids=kwargs.get("position_ids"), labels=labels)

    class OwnFormula(llama):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(input_ids=input_ids, **kwargs)
            loss = None
            if labels is not None:
                loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return output(loss=loss, logits=out.logits)

    class Mixed(llama):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
            loss = self.loss_function(self.lm_head(hidden), labels, self.vocab_size, **kwargs)
            return output(loss=loss + self.auxiliary(hidden), logits=hidden)

        def auxiliary(self, hidden: Any) -> Any:
            return hidden.mean()

    class Unshifted(llama):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
            return output(loss=self.loss_function(logits, labels, self.vocab_size), logits=logits)

    class Moved(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            if (loss := result.loss) is not None:
                result = output(loss.clone().to(torch.float32), result.logits)
            return result

    class Explicit(llama):
        def forward(self, input_ids: Any = None, shift_labels: Any = None, num_items_in_batch: Any = None, **kw: Any):
            return llama.forward(
                self, input_ids, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch, **kw
            )

    class Taken(llama):
        def forward(self, input_ids: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, **kwargs)

    class Popped(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("num_items_in_batch", None)
            return super().forward(*args, **kwargs)

    class Recounted(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if "num_items_in_batch" in kwargs:
                kwargs["num_items_in_batch"] = kwargs["num_items_in_batch"] // 2
            return super().forward(*args, **kwargs)

    class Relabelled(llama):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            labels = labels.masked_fill(labels < 20, -100)
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    class InPlace(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            loss = out.loss
            loss.add_(out.logits.mean())
            return output(loss=loss, logits=out.logits)

    class Local(llama):
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(*args, labels=labels, **kwargs)
            out.loss = out.loss * (labels > 20).float().mean()
            return out

    class Heads(llama):  # a list of losses
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
            logits = [self.lm_head(hidden), self.lm_head(hidden * 2)]
            losses = [self._loss_of(x, labels=labels, **kwargs) for x in logits]
            return output(loss=torch.stack(losses).sum(), logits=logits[0])

        def _loss_of(self, logits: Any, **kwargs: Any) -> Any:
            return self.loss_function(logits=logits, vocab_size=self.config.vocab_size, **kwargs)

    class Delegate(llama):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.language_model = llama(config)

        def get_decoder(self) -> Any:
            return self.language_model.model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.language_model(*args, **kwargs)

    class OwnFunction(llama):
        def loss_function(self, logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:  # pyright: ignore
            return transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **kwargs)

    class OwnTerm(llama):
        def loss_function(self, logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:  # pyright: ignore
            loss = transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **kwargs)
            return loss + 0.01 * logits.pow(2).mean()

    class OwnProperty(llama):
        @property
        def loss_function(self) -> Any:
            return transformers.loss.loss_utils.ForCausalLMLoss

    no_arguments = "hands no shift_labels and num_items_in_batch to its loss function"
    other_labels = "hands other labels, or another count of them, to its loss function than it got"
    term = "changes its loss by a further term"
    return {
        "plain": (Plain, ""), "passed": (Passed, ""), "off": (Off, ""), "zero": (Zero, ""), "moved": (Moved, ""),
        "explicit": (Explicit, ""), "heads": (Heads, ""), "delegate": (Delegate, ""), "a tuple": (Plainly, ""),
        "own function": (OwnFunction, ""),
        "own term": (OwnTerm, "OwnTerm has the loss loss_function, which is no sum over shift_labels"),
        "own property": (OwnProperty, "OwnProperty computes its loss by a formula of its own"),
        "taken": (Taken, f"Taken {no_arguments}"), "popped": (Popped, f"Popped {no_arguments}"),
        "named": (Named, f"Named {no_arguments}"), "unshifted": (Unshifted, f"Unshifted {no_arguments}"),
        "relabelled": (Relabelled, f"Relabelled {other_labels}"),
        "recounted": (Recounted, f"Recounted {other_labels}"),
        "in place": (InPlace, f"InPlace {term}, loss.add_"),
        "local": (Local, f"Local {term}, out.loss = out.loss \\* "),
        "decorated": (Decorated, f"Decorated {term}"), "wrapped": (Wrapped, f"Wrapped {term}"),
        "helped": (Helped, f"Helped {term}"),
        "penalised": (Penalised, f"Penalised {term}, if self.alpha > 0 and .*: out.loss \\+= self.alpha"),
        "weighted": (Weighted, f"Weighted {term}, return output\\(loss=out.loss \\+ weight"),
        "tuple": (Tuple, f"Tuple {term}, loss = loss \\+ self.config.penalty"),
        "mixed": (Mixed, f"Mixed {term}, return output\\(loss=loss \\+ self.auxiliary"),
        "own formula": (OwnFormula, "OwnFormula computes its loss by a formula of its own"),
    }  # fmt: skip


def made(kind: type) -> Any:
    transformers = library()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4)
    config.penalty = 0.1
    return kind(config).eval()


def ids_of(group: ProcessGroup) -> torch.Tensor:
    return torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(1))


def run(
    group: ProcessGroup, called: Any, switched: Any, words: str, change: Callable[[], object] | None = None
) -> None:
    """The losses of shards add up to that of one process, or the batch is refused; the model stays as it was."""
    ids = ids_of(group)
    wanted = called(input_ids=ids, labels=ids, use_cache=False)
    wanted = (wanted if isinstance(wanted, tuple) else wanted["loss"],)[0]
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).detach()
    name = ours.register(group)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forwards without an annotation are not known
            ours.switch(switched, name, unverified=True)
        if change is not None:
            change()
        before = {module: {**vars(module)} for module in called.modules()}
        batch = ours.shard_batch({"input_ids": ids, "labels": ids}, group)
        if words:
            with pytest.raises(UnsupportedError, match=f"{words}.*Leave labels out"):
                called(**batch)
        else:
            out = called(**batch)
            loss = (out[0] if isinstance(out, tuple) else out["loss"]).detach().clone()
            dist.all_reduce(loss, group=group)
            assert abs(loss - wanted) < 1e-5 * wanted
        assert all({**vars(module)}.keys() == names.keys() for module, names in before.items())
        assert all("_loss_function" not in names or vars(m)["_loss_function"] is names["_loss_function"]
                   for m, names in before.items())  # fmt: skip
    finally:
        ours.unregister()


@pytest.mark.ranks(1, 2)
def test_classes_of_ones_own(group: ProcessGroup) -> None:
    for name, (kind, words) in classes().items():
        if group.size() == 1 and ("further term" in words or name == "own term"):
            continue
        model = made(kind)
        run(group, model, model, words)


@pytest.mark.ranks(1)
def test_one_rank_adds_a_further_term_once(group: ProcessGroup) -> None:
    for name, (kind, words) in classes().items():
        if "further term" in words and name != "local":  # which reads labels, that are shifted there too
            model = made(kind)
            run(group, model, model, "")


@pytest.mark.ranks(2)
def test_conditions_are_those_of_the_call(group: ProcessGroup) -> None:
    """A term that is switched on, or by training, or by an argument, is seen when it is there."""
    kinds = {name: kind for name, (kind, _) in classes().items()}
    off = made(kinds["off"])
    words = "Off changes its loss by a further term, if self.alpha > 0"
    run(group, off, off, words, lambda: setattr(off, "alpha", 0.2))
    zero = made(kinds["zero"])
    run(group, zero, zero, "Zero changes its loss", lambda: setattr(zero, "weight", 0.2))


@pytest.mark.ranks(2)
def test_router_losses_and_z_losses(group: ProcessGroup) -> None:
    from tiny_models import tiny  # imports transformers

    model: Any = tiny("bamba")
    run(group, model, model, "", lambda: setattr(model, "z_loss_coefficient", 0.0))
    model = tiny("bamba")
    words = "BambaForCausalLM changes its loss by a further term, .*loss = loss \\+ self.z_loss_coefficient"
    run(group, model, model, words, lambda: setattr(model, "z_loss_coefficient", 0.1))
    mixtral: Any = tiny("mixtral")
    run(group, mixtral, mixtral, "")


@pytest.mark.ranks(2)
def test_forwards_that_somebody_replaced(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's and Liger's fused heads, which take shifted labels; what they add to the loss of a model is seen."""
    transformers = library()
    llama = transformers.LlamaForCausalLM

    def fused(
        self: Any, input_ids: Any, labels: Any = None, shift_labels: Any = None, **kwargs: Any
    ) -> "transformers.CausalLMOutputWithPast":
        count = kwargs.pop("num_items_in_batch", None)
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
        loss = loss / ((shift_labels != -100).sum() if count is None else count)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    def penalised(self: Any, *args: Any, **kwargs: Any) -> "transformers.CausalLMOutputWithPast":
        out = llama.forward(self, *args, **kwargs)
        out.loss = out.loss + out.logits.pow(2).mean()
        return out

    for function, words in ((fused, ""), (penalised, "changes its loss by a further term")):
        model = made(llama)
        model.forward = MethodType(function, model)
        run(group, model, model, words)
        model = made(llama)
        model.forward = functools.partial(function, model)
        run(group, model, model, words)
        in_class = type("InClass", (llama,), {})
        monkeypatch.setattr(in_class, "forward", function, raising=False)
        model = made(in_class)
        run(group, model, model, words)
    # A forward that bears the name of the class's is judged by what the class does.
    of_kinds = (llama, ""), (classes()["own formula"][0], "OwnFormula computes its loss by a formula of its own")
    for kind, words in of_kinds:
        model = made(kind)
        model.forward = torch.autocast("cpu", enabled=False)(model.forward)
        run(group, model, model, words)
    model = made(llama)
    model.forward = MethodType(functools.wraps(llama.forward)(fused), model)
    run(group, model, model, "")


class Mean:
    """A loss function that takes no count."""

    def __call__(self, logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **_: Any) -> Any:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


class Sum(Mean):
    """One that takes it."""

    def __call__(self, logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **kwargs: Any) -> Any:
        loss = super().__call__(logits, labels, vocab_size, shift_labels)
        targets = labels[:, 1:] if shift_labels is None else shift_labels
        count = (targets != -100).sum()
        return loss * count / (kwargs.get("num_items_in_batch") or count)


class Reduced:
    """Losses of which two objects share the function."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def loss(self, logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        labels = kwargs.get("shift_labels", nn.functional.pad(labels, (0, 1), value=-100)[:, 1:])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        is_mean = self.reduction == "mean"
        return loss / (1 if is_mean else (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.ranks(1, 2)
def test_loss_functions(group: ProcessGroup) -> None:
    """One is tried on four tokens: of twice the tokens the loss is twice as large, whatever is called labels."""
    ours_of = library().loss.loss_utils

    def focal(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_):
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="none")
        loss = ((1 - (-loss).exp()) ** 2 * loss).sum()
        return loss / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    def unshifted(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return loss / (labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch)

    def broken(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        assert logits.shape[:2] in ((2, 16), (2, 8)), "other tokens"
        return ours_of.ForCausalLMLoss(logits, labels, vocab_size, **kwargs)

    no_sum = "which is no sum over shift_labels, divided by num_items_in_batch"
    functions = [
        (focal, ""), (Sum(), ""), (functools.partial(focal, unused=3), ""), (ours_of.ForCausalLMLoss, ""),
        (lambda *args, **kwargs: ours_of.ForCausalLMLoss(*args, **kwargs), ""), (Mean(), f"Mean, {no_sum}"),
        (unshifted, f"unshifted, {no_sum}"), (ours_of.ForMaskedLMLoss, f"ForMaskedLMLoss, {no_sum}"),
        (broken, "broken, which raises AssertionError for four tokens: other tokens"),
        (Reduced("sum").loss, ""), (Reduced("mean").loss, f"loss, {no_sum}"), (Reduced("sum").loss, ""),
    ]  # fmt: skip
    for function, words in functions:
        model = made(library().LlamaForCausalLM)
        model.loss_function = function
        run(group, model, model, words and f"LlamaForCausalLM has the loss {words}")
        assert model.loss_function == function, function


class Around(nn.Module):
    """A module of one's own around a model, with a penalty."""

    def __init__(self, model: Any, alpha: float) -> None:
        super().__init__()
        self.inner, self.alpha = model, alpha

    def forward(self, **batch: Any) -> Any:
        out = self.inner(**batch)
        out.loss = out.loss + self.alpha * self.inner.lm_head.weight.pow(2).mean()
        return out


class Through(Around):
    """One that hands the loss on."""

    def forward(self, **batch: Any) -> Any:
        out = self.inner(**batch)
        return {"loss": out.loss, "logits": out.logits}


class Dropping(Around):
    """One that hands on no count."""

    def forward(self, num_items_in_batch: Any = None, **batch: Any) -> Any:
        return self.inner(**batch)


@pytest.mark.ranks(2)
def test_modules_around_a_model(group: ProcessGroup) -> None:
    llama = library().LlamaForCausalLM
    dropped = "LlamaForCausalLM got labels without shift_labels and num_items_in_batch, as shard_batch returns them"
    arithmetic = "Around does arithmetic on its loss, out.loss = "
    for kind, words in ((Around, arithmetic), (Through, ""), (Dropping, dropped)):
        model = made(llama)
        run(group, kind(model, 0.1), model, words)
    model = made(llama)
    run(group, nn.parallel.DistributedDataParallel(model, process_group=group), model, "")


@pytest.mark.ranks(2)
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters(group: ProcessGroup) -> None:
    """Given to ``switch`` with their adapters, and without, when they were there already or came after."""
    import peft

    llama = library().LlamaForCausalLM
    term = "PeftModelForCausalLM changes its loss by a further term, .*orth_reg_weight"
    adapters = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "init_lora_weights": False}
    steps = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "total_step": 10}
    untyped = peft.LoraConfig(r=2, target_modules=["q_proj"])  # a PeftModel, which calls its base by a method
    lora, unwatched = peft.LoraConfig(r=2, **adapters), "AdaLoraModel does arithmetic on its loss, .*orth_reg_weight"
    for config, words, inner in [
        (lora, "", ""), (untyped, "", ""),
        (peft.AdaLoraConfig(**adapters, **steps, orth_reg_weight=0.0), "", unwatched),
        (peft.AdaLoraConfig(**adapters, **steps, orth_reg_weight=0.5), term, unwatched),
    ]:  # fmt: skip
        model = peft.get_peft_model(made(llama), config).eval()
        run(group, model, model, words)
        base = made(llama)
        run(group, peft.get_peft_model(base, config).eval(), base, inner)
    from tiny_models import tiny  # imports transformers

    base: Any = tiny("mixtral")
    run(group, peft.get_peft_model(base, lora).eval(), base, "")
    base = tiny("bamba")
    run(group, peft.get_peft_model(base, lora).eval(), base, "")


@pytest.mark.ranks(2)
def test_an_interrupt_keeps_no_loss_function(group: ProcessGroup) -> None:
    """A batch after it is judged by itself, and the model can be copied and saved in between."""
    model = made(library().LlamaForCausalLM)
    ids, name = ids_of(group), ours.register(group)
    try:
        ours.switch(model, name)
        batch = ours.shard_batch({"input_ids": ids, "labels": ids}, group)
        wanted = model(**batch).loss

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        for _ in range(2):
            hook = model.lm_head.register_forward_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                model(**batch)
            hook.remove()
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        for each in (model, copied):
            assert torch.equal(each(**batch).loss, wanted)
            assert "_loss_function" not in vars(each)
            assert each.loss_function is library().loss.loss_utils.ForCausalLMLoss
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "words"), [("llama", ""), pytest.param("in place", "InPlace changes its loss", marks=pytest.mark.slow)]
)
def test_compiled_models(group: ProcessGroup, case: str, words: str) -> None:
    """The watch is traced, without a break of the graph for classes of packages; of others the loss is looked at."""
    kinds = {name: kind for name, (kind, _) in classes().items()}
    ids, name = ids_of(group), ours.register(group)
    try:
        torch.compiler.reset()
        model = made(kinds.get(case, library().LlamaForCausalLM))
        wanted = model(input_ids=ids, labels=ids, use_cache=False).loss.detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours.switch(model, name, unverified=True)
        compiled: Any = torch.compile(model, backend="eager", fullgraph=case == "llama")
        batch = ours.shard_batch({"input_ids": ids, "labels": ids}, group)
        for _ in range(2):
            if words:
                with pytest.raises(UnsupportedError, match=f"{words}.*Leave labels out"):
                    compiled(**batch)
                continue
            loss = compiled(**batch).loss.detach()
            dist.all_reduce(loss, group=group)
            assert abs(loss - wanted) < 1e-5 * wanted
    finally:
        ours.unregister()
