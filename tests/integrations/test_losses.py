"""Whether the loss of a forward is one sum over labels is read from its source; what nobody can tell is refused."""

import importlib.util
import warnings
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations import losses, model_parts
from tritoncomm.integrations import transformers as ours

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        return transformers


def classes() -> dict[str, tuple[type, str]]:
    """Return classes of one's own by name, with the words that they are refused with; "" for those that are right."""
    transformers = library()
    llama, output = transformers.LlamaForCausalLM, transformers.modeling_outputs.CausalLMOutputWithPast

    class Plain(llama): ...

    class Passed(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Scaled(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.loss = out.loss * 0.5
            return out

    class Penalised(llama):
        alpha = 0.1

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if self.alpha > 0 and out.loss is not None:
                out.loss += self.alpha * self.lm_head.weight.pow(2).mean()
            return out

    class Off(Penalised):
        alpha = 0

    class Trained(llama):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if self.training:
                out["loss"] = out["loss"] + out.logits.pow(2).mean()
            return out

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

    class Argument(llama):
        def forward(self, *args: Any, smooth: float | None = None, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if smooth is not None:
                out.loss = out.loss - out.logits.logsumexp(-1).mean()
            return out

    class Named(llama):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids, labels=labels)

    class OwnFormula(llama):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(input_ids=input_ids, **kwargs)
            loss = None
            if labels is not None:
                loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
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
            loss = result.loss
            loss = loss.to(torch.float32) if loss is not None else loss
            result = result if loss is None else output(loss, result.logits)
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

    class Relabelled(llama):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            labels = labels.masked_fill(labels == 3, -100)
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
            out.loss = out.loss * (labels != -100).float().mean()
            return out

    class Late(llama):
        aux = None

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            self.aux = out.logits.mean()
            if self.aux is not None:
                out.loss = out.loss + self.aux
            return out

    class NoLoss(llama):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            return self.lm_head(self.model(input_ids=input_ids, **kwargs)[0])

    return {
        "plain": (Plain, ""), "passed": (Passed, ""), "scaled": (Scaled, ""), "off": (Off, ""), "zero": (Zero, ""),
        "trained": (Trained, ""), "argument": (Argument, ""), "moved": (Moved, ""), "explicit": (Explicit, ""),
        "taken": (Taken, "Taken hands no shift_labels and num_items_in_batch to its loss function"),
        "popped": (Popped, "Popped hands no shift_labels and num_items_in_batch to its loss function"),
        "relabelled": (Relabelled, "Relabelled hands no shift_labels and num_items_in_batch to its loss function"),
        "in place": (InPlace, "InPlace adds a further term to its loss by"),
        "local": (Local, "Local multiplies its loss by (labels != -100).float().mean()"),
        "late": (Late, "Late adds a further term to its loss by aux"),
        "penalised": (Penalised, "Penalised adds a further term to its loss by alpha"),
        "weighted": (Weighted, "Weighted adds a further term to its loss by weight"),
        "tuple": (Tuple, "Tuple adds a further term to its loss by penalty"),
        "mixed": (Mixed, "Mixed adds a further term to its loss by auxiliary"),
        "own formula": (OwnFormula, "OwnFormula computes its loss by a formula of its own, nn.functional.cross_ent"),
        "named": (Named, "Named hands no shift_labels and num_items_in_batch to its loss function"),
        "unshifted": (Unshifted, "Unshifted hands no shift_labels and num_items_in_batch to its loss function"),
        "no loss": (NoLoss, "hands no labels to a loss function"),
    }  # fmt: skip


def made(kind: type) -> Any:
    transformers = library()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    torch.manual_seed(0)
    model = kind(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    model.config.penalty = 0.1
    return model.eval()


def test_classes_of_ones_own() -> None:
    for name, (kind, words) in classes().items():
        problem = model_parts.wrong_loss(made(kind), {"labels": True})
        assert (problem or "").startswith(words) if name != "no loss" else words in (problem or ""), (name, problem)
        assert bool(problem) == bool(words), (name, problem)


def test_one_rank_adds_a_further_term_once() -> None:
    """But its labels are shifted, too, so that a formula of the model's own is wrong there."""
    for name, (kind, words) in classes().items():
        problem = model_parts.wrong_loss(made(kind), {"labels": True}, False)
        is_once = "further term" in words or "multiplies" in words
        assert (problem is None) == (not words or is_once), (name, problem)


def test_conditions_are_read_as_they_are_in_the_call() -> None:
    kinds = {name: kind for name, (kind, _) in classes().items()}
    trained, argument = made(kinds["trained"]), made(kinds["argument"])
    assert losses.wrong_loss(trained, {"labels": True}) is None
    assert "by training, out.logits.pow(2).mean()" in (losses.wrong_loss(trained.train(), {"labels": True}) or "")
    assert losses.wrong_loss(argument, {"labels": True, "smooth": None}) is None
    assert "by smooth" in (losses.wrong_loss(argument, {"labels": True, "smooth": 0.5}) or "")
    off = made(kinds["off"])
    off.alpha = 0.2
    assert "by alpha" in (losses.wrong_loss(off, {"labels": True}) or "")


def test_router_losses_and_z_losses() -> None:
    from tiny_models import tiny  # imports transformers

    for name, option, on in (("mixtral", "output_router_logits", True), ("bamba", "z_loss_coefficient", 0.1)):
        model: Any = tiny(name)
        assert losses.wrong_loss(model, {"labels": True}) is None
        owner = model.config if name == "mixtral" else model
        setattr(owner, option, on)
        assert f"by {option}" in (losses.wrong_loss(model, {"labels": True}) or "")
        setattr(owner, option, type(on)(0))
        assert losses.wrong_loss(model, {"labels": True}) is None
    assert "by output_router_logits" in (
        losses.wrong_loss(tiny("mixtral"), {"labels": True, "output_router_logits": True}) or ""
    )


def test_forwards_that_somebody_replaced_are_judged_by_what_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's and Liger's fused heads, which take shifted labels; a decorator replaces nothing."""
    transformers = library()
    on_instance, in_class, decorated = made(transformers.LlamaForCausalLM), classes()["plain"][0], classes()["plain"][0]

    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    on_instance.forward = MethodType(fused, on_instance)
    assert losses.is_replaced(on_instance)
    assert model_parts.wrong_loss(on_instance, {"labels": True}) is None

    def other(self: Any, *args: Any, **kwargs: Any) -> "transformers.CausalLMOutputWithPast":
        return transformers.LlamaForCausalLM.forward(self, *args, **kwargs)

    monkeypatch.setattr(in_class, "forward", other, raising=False)
    assert losses.is_replaced(made(in_class))
    assert model_parts.wrong_loss(made(in_class), {"labels": True}) is None
    model = made(decorated)
    model.forward = torch.autocast("cpu")(model.forward)
    assert not losses.is_replaced(model)
    assert model_parts.wrong_loss(model, {"labels": True}) is None
    bert = transformers.BertForMaskedLM(
        transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    )
    bert.forward = MethodType(fused, bert)
    assert "BertForMaskedLM computes no loss from labels" in (model_parts.wrong_loss(bert, {"labels": True}) or "")


def test_loss_functions() -> None:
    transformers = library()
    model = made(transformers.LlamaForCausalLM)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum() / kwargs["num_items_in_batch"]
    assert model_parts.wrong_loss(model, {"labels": True}) is None
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()
    assert "which takes no num_items_in_batch" in (model_parts.wrong_loss(model, {"labels": True}) or "")
    model.loss_function = transformers.loss.loss_utils.ForMaskedLMLoss
    assert "the loss ForMaskedLMLoss, which shifts no labels" in (model_parts.wrong_loss(model, {"labels": True}) or "")


class Around(nn.Module):
    """A module of one's own around a model, with a penalty."""

    def __init__(self, model: Any, alpha: float) -> None:
        super().__init__()
        self.inner, self.alpha = model, alpha

    def forward(self, **batch: Any) -> Any:
        out = self.inner(**batch)
        out.loss = out.loss + self.alpha * self.inner.lm_head.weight.pow(2).mean()
        return out


@pytest.mark.ranks(2)
def test_labels_are_refused_or_right(group: ProcessGroup) -> None:
    """On every rank and before anything is sent, by a class of one's own, a module around a model, and adapters."""
    ids = torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(1))
    name = ours.register(group)
    cases: list[tuple[Any, Any, str]] = []
    for label in ("passed", "zero", "penalised", "own formula"):
        kind, words = classes()[label]
        model = made(kind)
        cases.append((model, model, words))
    for alpha, words in ((0.0, ""), (0.5, "Around adds a further term to its loss by alpha")):
        model = made(library().LlamaForCausalLM)
        cases.append((Around(model, alpha), model, words))
    if importlib.util.find_spec("peft") is not None:
        import peft

        adapters = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "init_lora_weights": False}
        steps = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "total_step": 10}
        model = peft.get_peft_model(made(library().LlamaForCausalLM), peft.LoraConfig(r=2, **adapters)).eval()
        cases.append((model, model, ""))
        untyped = peft.LoraConfig(r=2, target_modules=["q_proj"])  # a PeftModel, which calls its base by a method
        model = peft.get_peft_model(made(library().LlamaForCausalLM), untyped).eval()
        assert model_parts.wrong_loss(model, {"labels": True}) is None
        cases.append((model, model, ""))
        for weight, words in ((0.0, ""), (0.5, "AdaLoraModel adds a further term to its loss by orth_reg_weight")):
            for is_inner in (False, True):
                inner = made(library().LlamaForCausalLM)
                config = peft.AdaLoraConfig(**adapters, **steps, orth_reg_weight=weight)
                model = peft.get_peft_model(inner, config).eval()
                cases.append((model, inner if is_inner else model, words))
    try:
        for model, switched, words in cases:
            wanted = model(input_ids=ids, labels=ids, use_cache=False).loss.detach()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # forwards without an annotation are not known
                ours.switch(switched, name, unverified=True)
            batch = ours.shard_batch({"input_ids": ids, "labels": ids}, group)
            if words:
                with pytest.raises(UnsupportedError, match=f"{words}.*Leave labels out"):
                    model(**batch)
                continue
            loss = model(**batch).loss.detach()
            dist.all_reduce(loss, group=group)
            assert abs(loss - wanted) < 1e-5 * wanted
    finally:
        ours.unregister()
