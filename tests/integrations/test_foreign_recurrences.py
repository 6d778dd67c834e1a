"""Recurrent layers of code that is not transformers', by ``register_recurrence``: right, or refused by name."""

import copy
import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers import recurrences, registration
from tritoncomm.integrations.transformers.batch import IGNORED
from tritoncomm.recurrent import Exchanged, Sliced

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
LENGTH, STARTS = 24, (0, 5, 6, 17)
ROLES = {"q": Exchanged(), "k": Exchanged(), "v": Exchanged(columns=3), "decay": Exchanged(), "slope": Sliced()}
CASES = {
    "plain": {},
    "padded": {"attention_mask": torch.tensor([[1] * 20 + [0] * 4, [0] * 7 + [1] * 17])},
    "packed": {"position_ids": torch.tensor([[i - max(s for s in STARTS if s <= i) for i in range(LENGTH)]] * 2)},
}


@contextmanager
def registering() -> Iterator[Any]:
    import foreign_model as functions

    ours.register_recurrence(functions.decayed_sum, ROLES, Exchanged(columns=3))
    ours.register_recurrence(functions.step_by_step, ROLES, Exchanged(columns=3))
    ours.register_convolution(functions.short_convolution)
    try:
        yield functions
    finally:
        ours.unregister()
        for function in [function for function, _ in recurrences._registered]:
            ours.unregister_recurrence(function)


def drawn() -> Tensor:
    return torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def whole(model: Any, ids: Tensor, case: str) -> tuple[Tensor, Tensor]:
    """Logits and labels of one process, after the backward of the mean over labels; each document by itself."""
    labels, mask = ids.clone(), CASES[case].get("attention_mask")
    if case == "packed":
        stops = (*STARTS[1:], LENGTH)
        logits = torch.cat([model(ids[:, a:b]).logits for a, b in zip(STARTS, stops, strict=True)], 1)
        labels[:, STARTS] = IGNORED
    else:
        logits = model(ids, attention_mask=mask).logits
        labels = labels if mask is None else labels.masked_fill(mask == 0, IGNORED)
    shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten()).backward()
    return logits.detach(), labels


def assert_alike(group: ProcessGroup, model: Any, reference: Any, found: Tensor, wanted: Tensor, case: str) -> None:
    mask = CASES[case].get("attention_mask", torch.ones(2, LENGTH)).chunk(group.size(), 1)[group.rank()].bool()
    part = wanted.chunk(group.size(), 1)[group.rank()]
    torch.testing.assert_close(found[mask], part[mask], atol=1e-9, rtol=0)
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        dist.all_reduce(grad, group=group)
        assert (grad - other.grad).abs().max() < 1e-5 * other.grad.abs().max().clamp(min=1e-3), name


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_training", [False, True])
def test_numbers_are_those_of_one_process(group: ProcessGroup, case: str, is_training: bool) -> None:
    with registering() as functions:
        model, ids = functions.foreign().train(is_training), drawn()
        reference = copy.deepcopy(model)
        wanted, labels = whole(reference, ids, case)
        ours.switch(model, ours.register(group))
        out = model(**ours.shard_batch({"input_ids": ids, "labels": labels, **CASES[case]}, group))
        out.loss.backward()
        assert_alike(group, model, reference, out.logits.detach(), wanted, case)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation(group: ProcessGroup, use_reentrant: bool) -> None:
    """The convolution inside of a layer has the batch in backward, too, where no forward of the model runs."""
    with registering() as functions:
        model, ids = functions.foreign(), drawn()
        reference = copy.deepcopy(model)
        wanted, labels = whole(reference, ids, "packed")
        ours.switch(model, ours.register(group))
        for layer in model.layers:
            forward = layer.forward
            layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=use_reentrant)
        out = model(**ours.shard_batch({"input_ids": ids, "labels": labels, **CASES["packed"]}, group))
        out.loss.backward()
        assert_alike(group, model, reference, out.logits.detach(), wanted, "packed")


@pytest.mark.ranks(2)
def test_copies_and_saved_models_compute_over_shards(group: ProcessGroup) -> None:
    with registering() as functions:
        model, ids = functions.foreign(), drawn()
        wanted = model(ids).logits.chunk(group.size(), 1)[group.rank()]
        ours.switch(model, ours.register(group))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        batch = ours.shard_batch({"input_ids": ids}, group)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            torch.testing.assert_close(other(**batch).logits, wanted, atol=1e-9, rtol=0)


@pytest.mark.ranks(2)
def test_switch_back_and_unregister_leave_nothing(group: ProcessGroup) -> None:
    with registering() as functions:
        before = {name: getattr(functions, name) for name in ("decayed_sum", "short_convolution", "step_by_step")}
        model, ids = functions.foreign(), drawn()
        wanted = model(ids).logits
        ours.switch(model, ours.register(group))
        assert all(getattr(functions, name) is not value for name, value in before.items())
        torch.testing.assert_close(functions.foreign()(ids).logits, wanted, atol=0, rtol=0)  # another one is as before
        ours.switch(model, "sdpa")
        assert all(getattr(functions, name) is value for name, value in before.items())
        torch.testing.assert_close(model(ids).logits, wanted, atol=0, rtol=0)
        assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.ranks(2)
def test_other_roles_after_unregister(group: ProcessGroup) -> None:
    """The next switch computes by them, whatever an earlier one has kept."""
    with registering() as functions:
        model, ids = functions.foreign(), drawn()
        name = ours.register(group)
        ours.switch(model, name)
        batch = ours.shard_batch({"input_ids": ids}, group)
        model(**batch)
        original = recurrences.original_of(functions.decayed_sum)
        with pytest.raises(ArgumentError, match="is registered as"):
            ours.register_recurrence(original, {**ROLES, "slope": None}, Exchanged(columns=3))
        ours.unregister_recurrence(original)
        with pytest.raises(
            UnsupportedError, match=r"Mixer calls decayed_sum of foreign_model, which is not registered"
        ):
            model(**batch)
        ours.register_recurrence(original, {key: role for key, role in ROLES.items() if key != "slope"})
        ours.switch(model, name)
        with pytest.raises(ArgumentError, match="the tensor 'slope' has no role"):
            model(**batch)
        assert original in registration.registered[name].functions


def of_package(function: Any) -> Any:
    """The function as one of a package that nobody has registered."""
    return mock.patch.object(function, "__module__", "fla.ops.gla.chunk")


@pytest.mark.ranks(2)
def test_what_is_not_registered_is_refused(group: ProcessGroup) -> None:
    with registering() as functions:
        name, ids = ours.register(group), drawn()
        model = functions.foreign()
        ours.unregister_recurrence(functions.short_convolution)
        with pytest.raises(
            UnsupportedError, match="ShortConvolution in Mixer mixes positions, and would stop at the end"
        ):
            ours.switch(model, name)
        ours.unregister_recurrence(functions.step_by_step)
        ours.register_convolution(functions.short_convolution)
        with of_package(functions.step_by_step):
            ours.switch(model, name)
            batch = ours.shard_batch({"input_ids": ids}, group)
            assert model.train()(**batch).logits.shape[1] == LENGTH // 2
            with pytest.raises(
                UnsupportedError, match=r"Mixer calls step_by_step of fla.ops.gla.chunk, which is not regis"
            ):
                model.eval()(**batch)
            ours.switch(model, "sdpa")
            ours.unregister_recurrence(functions.decayed_sum)
            ours.unregister_recurrence(functions.short_convolution)
            for layer in model.layers:
                layer.mixer.convolution = nn.Identity()
            ours.switch(model, name)  # its layers may take another path
            with pytest.raises(UnsupportedError, match=r"ForeignForCausalLM calls step_by_step of fla.ops.gla.chunk"):
                model(**batch)
            ours.switch(model, "sdpa")
            assert model(ids).logits.shape[1] == LENGTH
            assert functions.step_by_step(*torch.ones(3, 1, 2, 1, 4), decay=torch.ones(1, 2, 1), slope=torch.ones(1))


@pytest.mark.ranks(2)
def test_a_layer_that_calls_none_of_its_functions_is_refused(group: ProcessGroup) -> None:
    """Replaced as a whole, or with a function that is not the one that was registered."""
    with registering() as functions:
        model, ids = functions.foreign(), drawn()
        ours.switch(model, ours.register(group))
        batch = ours.shard_batch({"input_ids": ids}, group)
        mixer = model.layers[0].mixer
        with (
            mock.patch.object(mixer.convolution, "forward", lambda x: x),
            pytest.raises(UnsupportedError, match="ShortConvolution did not call short_convolution as"),
        ):
            model(**batch)
        original = recurrences.original_of(functions.decayed_sum)
        with (
            mock.patch.multiple(functions, decayed_sum=original, step_by_step=original),
            pytest.raises(UnsupportedError, match="Mixer did not call decayed_sum or step_by_step as"),
        ):
            model(**batch)
        with pytest.raises(ArgumentError, match="no batch of shard_batch came here"):
            mixer(torch.zeros(1, 12, 32, dtype=torch.float64))
        assert model(**batch).logits.shape[1] == LENGTH // 2


@pytest.mark.ranks(2)
def test_layers_without_a_mask_are_refused(group: ProcessGroup) -> None:
    with registering() as functions:

        class Unmasked(functions.Mixer):
            def forward(self, hidden_states: Tensor) -> Tensor:
                return functions.Mixer.forward(self, hidden_states)

        model, name = functions.foreign(), ours.register(group)
        mixer = Unmasked(model.config)
        with mock.patch.object(model.layers[0], "mixer", mixer):
            model.layers[0]._modules["mixer"] = mixer
            with pytest.raises(UnsupportedError, match="Unmasked takes no attention_mask"):
                ours.switch(model, name)


def test_wrong_arguments() -> None:
    with registering() as functions:
        function = functions.decayed_sum
        ours.register_recurrence(function, dict(ROLES), Exchanged(columns=3))  # as before
        with pytest.raises(ArgumentError, match="has no parameter query; it has q, k, v, decay, slope"):
            ours.register_recurrence(function, {"query": Exchanged()})
        with pytest.raises(ArgumentError, match="has no parameter cu_seqlens"):
            ours.register_recurrence(function, boundaries="cu_seqlens")
        with pytest.raises(ArgumentError, match="needs a function, not str"):
            ours.register_recurrence("decayed_sum")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="is registered as Recurrence"):
            ours.register_convolution(function)
        with pytest.raises(ArgumentError, match="drawn is not registered"):
            ours.unregister_recurrence(drawn)
