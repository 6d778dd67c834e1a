"""One causal language model of transformers over sequence shards, against the same model in one process."""

import warnings

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tritoncomm.integrations import transformers as ours

__all__ = ["verdict"]

LENGTH, TOLERANCE = 16, 1e-3  # a wrong model is off by a third and more


def verdict(group: ProcessGroup, name: str, seed: int, kv_heads: int) -> str:
    """``right``, ``refused: ...``, ``wrong: ...``, ``not run: ...`` or ``absent``; the same on every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tiny_models import NOT_RUN, names, tiny  # imports transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        if name in NOT_RUN or name not in names():
            return f"not run: {NOT_RUN[name]}" if name in NOT_RUN else "absent"
        model = tiny(name, seed, kv_heads)
        ids = torch.randint(3, 90, (1, LENGTH), generator=torch.Generator().manual_seed(seed + 1))
        with torch.no_grad():
            model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
            wanted = model(input_ids=ids, use_cache=False).logits
            registered = ours.register(group, name=f"sweep_{name}")
            error = None
            try:
                ours.switch(model, registered)
                batch = ours.shard_batch({"input_ids": ids, "labels": ids}, group)
                found = model(**batch, use_cache=False).logits
            except Exception as problem:  # whatever transformers raises for an attention that it does not take
                error = problem
            finally:
                ours.unregister(registered)
        texts = [""] * group.size()
        text = "" if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(texts, text, group=group)
        if any(texts):
            return f"refused: {next(filter(None, texts))}"
        part = wanted.chunk(group.size(), 1)[group.rank()]
        off = (found - part).abs().max() / wanted.abs().max()
        dist.all_reduce(off, dist.ReduceOp.MAX, group)
        return "right" if off <= TOLERANCE else f"wrong: off by {off:.2g} of the largest logit"
