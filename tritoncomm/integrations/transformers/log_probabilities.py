"""Log-probabilities of tokens over sequence shards, for the losses of one's own loop: preferences, policies, rewards.

The model runs on its shard. Its head is applied to chunks of positions that have a label, forward and again in
backward, so that logits of a sequence never exist; what the ranks have is put side by side, a few bytes a token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tritoncomm.core.autograd import once_differentiable
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.groups import resolve_sequence
from tritoncomm.integrations.transformers.batch import IGNORED, shard_batch
from tritoncomm.integrations.transformers.hooks import switches_of
from tritoncomm.integrations.transformers.model_parts import outermost, text_config
from tritoncomm.integrations.transformers.recurrent_layers import parameters_of
from tritoncomm.integrations.transformers.registration import registered
from tritoncomm.mappings import all_gather_dim

__all__ = ["TokenLogProbs", "log_probs"]

_NAME = "log_probs"
# Scale and dtype with which the logits of a model were found to be the product of its head.
_compared: "WeakKeyDictionary[nn.Module, tuple[_Scale, torch.dtype]]" = WeakKeyDictionary()


class TokenLogProbs(NamedTuple):
    """Numbers of the tokens of a batch, of all positions on every rank; 0 for a token without a label.

    Attributes:
        log_probs: ``[b, S-1]``, fp32 (fp64 of fp64): entry i is of token i+1, given those before.
        entropy: ``[b, S-1]``, of the distribution that token i+1 is drawn from; None unless asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


class _Scale(NamedTuple):
    """Logits of a model from the product x of its head: ``softcap * tanh(x * factor / softcap)``, or ``x * factor``."""

    factor: float
    softcap: float | None


class _HeadOptions(NamedTuple):
    """Options of ``log_probs`` that its autograd function needs."""

    scale: _Scale
    temperature: float
    entropy: bool
    chunk_size: int


def log_probs(
    model: nn.Module,
    batch: Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_size: int = 1024,
    pad_token_id: int = 0,
) -> TokenLogProbs:
    """Return the log-probabilities of the labels of a batch under a model that computes over sequence shards.

    Forward: the model on this rank's shard, without its head; the head on chunks of the positions with a label; one
    all-gather of 4 bytes a token and field. Backward: the chunks again. Each rank takes its own part of the gradient,
    as a loss of these numbers is the same on every rank: gradients add up over the group, as with ``shard_batch``. All
    ranks of the group call. On a GPU the host waits for the labels.

    Args:
        model: given to ``switch`` with an attention over ``group``; also in DistributedDataParallel, FSDP2 or peft.
        batch: as for ``shard_batch``, with ``labels`` ``[b, S]``: the ids of tokens to score, -100 for others. They are
            not shifted; ``shift_labels`` are.
        group: the ranks; the tensor group by default, unless there is a context axis.
        temperature: divides the logits, for the entropy too.
        chunk_size: positions whose logits exist at a time, in fp32 (fp64 of fp64): at most three tensors of them.
        pad_token_id: as for ``shard_batch``.

    Returns:
        Log-probabilities and entropies of all positions.

    Raises:
        ArgumentError: no labels; a model that was not switched to this group; a temperature or chunk size that is not
            above 0.
        UnsupportedError: the head is no plain ``nn.Linear`` (adapters, quantization, hooks, tensor or ZeRO-3 shards),
            or its product is not what the model returns as logits; or the model has no ``logits_to_keep``.
    """
    ranks = resolve_sequence(group, _NAME)
    outer = _checked_model(model, ranks)
    if not (temperature > 0 and type(chunk_size) is int and chunk_size > 0):
        raise ArgumentError(f"{_NAME}: temperature {temperature!r} and chunk_size {chunk_size!r} have to be above 0")
    if batch.get("labels") is None and batch.get("shift_labels") is None:
        raise ArgumentError(f"{_NAME}: a batch needs labels, the tokens to score; {IGNORED} for others")
    shard = shard_batch(batch, ranks, pad_token_id=pad_token_id)
    labels = shard.pop("shift_labels")
    del shard["labels"], shard["num_items_in_batch"]
    head, scale = _head_of(outer), _scale_of(text_config(outer.config))
    hidden, last_logits = _outputs_of(model, outer, shard)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    hidden = hidden.to(dtype)
    weight = _whole(head.weight).to(dtype)
    bias = None if head.bias is None else _whole(head.bias).to(dtype)
    _check_logits(outer, hidden[:, -1:], last_logits, weight, bias, scale)
    positions = (labels != IGNORED).flatten().nonzero()[:, 0]
    options = _HeadOptions(scale, temperature, entropy, chunk_size)
    targets = labels.flatten()[positions]
    # The logits get a gradient of zeros: FSDP2 gathers the root's parameters for backward where its output gets one.
    numbers = _LabelLogProbs.apply(hidden.flatten(0, 1), weight, bias, last_logits, positions, targets, options)
    numbers = numbers if entropy else numbers[:1]  # each [b * s]
    whole = _of_all_ranks(torch.stack(numbers).view(-1, labels.shape[1]), ranks)  # [len(numbers) * b, S]
    fields = whole.unflatten(0, (len(numbers), len(labels)))[..., : batch["input_ids"].shape[1] - 1]
    return TokenLogProbs(fields[0], fields[1] if entropy else None)


def _of_all_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Put shards ``[rows, s]`` side by side; backward takes this rank's part, as all ranks compute the same loss."""
    return x if group.size() == 1 else all_gather_dim(x, 1, group, tensor_parallel_output_grad=False)


def _checked_model(model: nn.Module, group: ProcessGroup) -> Any:
    """Return the model of transformers in a module; reject one that computes not over the shards of a group."""
    outer: Any = outermost(model.modules())
    if outer is None:
        raise ArgumentError(f"{_NAME}: needs a model of transformers, not {type(model).__name__}")
    names = [owner.name for owner in switches_of(outer) if owner.is_on and owner.is_active(outer)]
    groups = [registered[name].group for name in names if name in registered]
    if group.size() > 1 and group not in groups:
        raise ArgumentError(
            f"{_NAME}: {type(outer).__name__} was not switched to an attention over the {group.size()} ranks of this "
            "group; call switch(model, register(group)) first"
        )
    if "logits_to_keep" not in parameters_of(type(outer)):
        raise UnsupportedError(f"{_NAME}: {type(outer).__name__} has no logits_to_keep, and would make all logits")
    return outer


def _head_of(outer: Any) -> nn.Linear:
    """Return the head of a model, whose output is the product of its weight, now and after training.

    An adapter may change nothing until it is trained, so types and hooks are looked at, not values. FSDP2 may shard the
    weight.
    """
    head: Any = outer.get_output_embeddings()
    is_linear = type(head) is nn.Linear or type(head).__mro__[1:3] == (FSDPModule, nn.Linear)  # as fully_shard makes it
    reason = None
    if not is_linear:
        reason = "is no torch.nn.Linear"
    elif "forward" in vars(head) or any(map(_has_hooks_of_others, (head._forward_pre_hooks, head._forward_hooks))):
        reason = "has hooks, or a forward of its own"
    elif not head.weight.is_floating_point() or head.weight.numel() == 0:
        reason = "has a quantized weight, or none, as under ZeRO-3"
    if reason is not None:
        raise UnsupportedError(
            f"{_NAME}: the head of {type(outer).__name__}, {type(head).__name__}, {reason}: its logits are not those "
            "of its weight. Leave it out of adapters and quantization, or merge them; shard by FSDP2"
        )
    return head


def _has_hooks_of_others(hooks: Mapping[int, Any]) -> bool:
    """Whether some hooks are not those of FSDP2."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.") for hook in hooks.values()
    )


def _scale_of(config: Any) -> _Scale:
    """Return the scale of logits that a config names; ``_check_logits`` compares."""
    factor = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):  # of Cohere, of Falcon-H1
        factor *= float(getattr(config, name, None) or 1.0)
    factor /= float(getattr(config, "logits_scaling", None) or 1.0)  # of Granite
    softcap = getattr(config, "final_logit_softcapping", None)  # of Gemma
    return _Scale(factor, None if softcap is None else float(softcap))


class _Outputs(NamedTuple):
    """Hidden states of a shard ``[b, s, hidden]``, and logits of its last position ``[b, 1, V]``."""

    hidden: Tensor
    last_logits: Tensor


def _outputs_of(model: nn.Module, outer: Any, shard: dict[str, Any]) -> _Outputs:
    """Run a model, through whatever is around it, and return what its head gets."""
    outputs: list[Any] = []
    handle = outer.get_decoder().register_forward_hook(lambda _, __, out: outputs.append(out))
    try:
        logits = model(**shard, use_cache=False, logits_to_keep=1).logits
    finally:
        handle.remove()
    hidden = getattr(outputs[-1], "last_hidden_state", None) if outputs else None
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise UnsupportedError(f"{_NAME}: the decoder of {type(outer).__name__} returns no last_hidden_state [b, s, h]")
    return _Outputs(hidden, logits)


def _whole(parameter: Tensor) -> Tensor:
    """Return a parameter, gathered where FSDP2 has sharded it; backward leaves the mean of gradients, as FSDP2."""
    if not isinstance(parameter, DTensor):
        return parameter
    shards = [placement for placement in parameter.placements if not isinstance(placement, Replicate)]
    if shards != [Shard(0)]:
        raise UnsupportedError(f"{_NAME}: a head with the placements {parameter.placements} is not one of FSDP2 alone")
    # Each rank has a gradient of its own positions; without grad_placements it would keep a slice of its own alone.
    mesh = parameter.device_mesh
    whole = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / mesh.size())
    return whole


def _check_logits(
    outer: Any, hidden: Tensor, logits: Tensor, weight: Tensor, bias: Tensor | None, scale: _Scale
) -> None:
    """Reject a head whose product is not what the model returns; compared in the first call of a model."""
    if _compared.get(outer) == (scale, weight.dtype):
        return
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        product = _scaled(F.linear(hidden, weight, bias), scale)
        off = (product - logits).abs().max().item()
        if not off <= 32 * torch.finfo(logits.dtype).eps * max(logits.abs().max().item(), 1.0):
            raise UnsupportedError(
                f"{_NAME}: the logits of {type(outer).__name__} are not the product of its head: off by {off:.2g} at "
                "one position. It scales or changes them in a way that is not known here"
            )
    _compared[outer] = scale, weight.dtype


def _scaled(x: Tensor, scale: _Scale) -> Tensor:
    """Return logits from the product of a head, in its memory."""
    x = x if scale.factor == 1 else x.mul_(scale.factor)
    return x if scale.softcap is None else x.div_(scale.softcap).tanh_().mul_(scale.softcap)


class _LabelLogProbs(Function):
    """Forward: log-probabilities and entropies ``[n]`` of the rows at some positions by chunks of the head, else 0.

    With ``z = logits / temperature``, ``p = softmax(z)``, ``log_p = z[label] - logsumexp(z)`` and ``entropy =
    logsumexp(z) - sum(p * z)``. Backward: the chunks again, ``dz = g * (onehot - p) - h * p * (log p + entropy)`` for
    gradients g and h of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        last_logits: Tensor,
        positions: Tensor,
        labels: Tensor,
        options: _HeadOptions,
    ) -> Any:
        wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        log_p, entropies, logsumexps = (hidden.new_zeros(len(positions), dtype=wide) for _ in range(3))
        for start in range(0, len(positions), options.chunk_size):
            part = slice(start, start + options.chunk_size)
            z = _chunk(hidden, weight, bias, positions[part], options)
            logsumexps[part] = z.logsumexp(1)
            log_p[part] = z.gather(1, labels[part, None])[:, 0] - logsumexps[part]
            if options.entropy:
                entropies[part] = logsumexps[part] - (z - logsumexps[part, None]).exp_().mul_(z).sum(1)
        # ``last_logits`` get a gradient of zeros, so that the model's own head is part of the graph.
        ctx.options, ctx.shape, ctx.dtype = options, last_logits.shape, last_logits.dtype
        ctx.save_for_backward(hidden, weight, bias, positions, labels, logsumexps, entropies)
        zeros = hidden.new_zeros(len(hidden), dtype=wide)
        return zeros.index_put((positions,), log_p), zeros.index_put((positions,), entropies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, positions, labels, logsumexps, entropies = ctx.saved_tensors
        options: _HeadOptions = ctx.options
        scale, temperature = options.scale, options.temperature
        of_log_p, of_entropy = grads[0][positions], grads[1][positions]
        grad_hidden = torch.zeros_like(hidden)
        # Chunks are added up in fp32; each has one rounding to the dtype of the head.
        wide = logsumexps.dtype
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for start in range(0, len(positions), options.chunk_size):
            part = slice(start, start + options.chunk_size)
            z = _chunk(hidden, weight, bias, positions[part], options)
            # With p = softmax(z), log p(label) has the derivative onehot - p, and the entropy H has -p * (z - m), with
            # the mean m = sum(p * z) = logsumexp(z) - H.
            p = (z - logsumexps[part, None]).exp_()
            if options.entropy:
                dz = z - (logsumexps - entropies)[part, None]
                dz.mul_(of_entropy[part, None]).add_(of_log_p[part, None]).mul_(p).neg_()
            else:
                dz = p.mul_(-of_log_p[part, None])
            del p
            dz.scatter_add_(1, labels[part, None], of_log_p[part, None])
            if scale.softcap is not None:  # z * temperature / softcap is the tanh
                dz.mul_(z.mul_(temperature / scale.softcap).square_().neg_().add_(1))
            del z
            dz = dz.mul_(scale.factor / temperature).to(hidden.dtype)
            grad_hidden[positions[part]] = dz @ weight
            if grad_weight is not None:
                grad_weight += dz.t() @ hidden[positions[part]]
            if grad_bias is not None:
                grad_bias += dz.sum(0, dtype=wide)
            del dz  # before the next chunk is made
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        # Zeros, as the results do not depend on the logits; see ``forward``.
        grad_logits = hidden.new_zeros(ctx.shape, dtype=ctx.dtype)
        return grad_hidden, grad_weight, grad_bias, grad_logits, None, None, None


def _chunk(hidden: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, options: _HeadOptions) -> Tensor:
    """Return the logits of some positions ``[n, V]`` over the temperature, in fp32 (fp64 of fp64)."""
    with torch.autocast(hidden.device.type, enabled=False):
        z = F.linear(hidden[positions], weight, bias)
    z = _scaled(z if z.dtype is torch.float64 else z.float(), options.scale)
    return z if options.temperature == 1 else z.div_(options.temperature)
