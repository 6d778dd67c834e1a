"""yunchang's test programs print the same numbers with our all-to-alls in the place of its."""

import contextlib
import importlib
import io
import runpy
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tritoncomm.integrations.yunchang import SeqAllToAll4D, SeqAllToAll5D

# What runs on a CPU: the others ask for kernels, and torch's attention has no backward in the hybrid one.
PROGRAMS = {
    "test_ulysses_attn.py": [],
    "test_hybrid_attn.py": ["--attn_impl", "torch_math", "--causal", "--seqlen", "256"],
}
USERS = ("comm.all_to_all", "ulysses.attn_layer", "hybrid.attn_layer", "hybrid.async_attn_layer")


@pytest.fixture(scope="session", autouse=True)
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def printed(program: str, ours: dict[str, Any]) -> str:
    """What the program prints on this rank, with these names in the modules that have them."""
    torch.manual_seed(0)
    text = io.StringIO()
    with contextlib.ExitStack() as stack:
        for user in USERS:
            module = importlib.import_module(f"yunchang.{user}")
            for name in ours.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, ours[name]))
        stack.enter_context(mock.patch.object(dist, "init_process_group"))
        stack.enter_context(mock.patch.object(dist, "destroy_process_group"))
        stack.enter_context(mock.patch.object(sys, "argv", [program, *PROGRAMS[program]]))
        stack.enter_context(mock.patch.object(sys, "path", [str(Path("test").resolve()), *sys.path]))
        stack.enter_context(contextlib.redirect_stdout(text))
        runpy.run_path(f"test/{program}", run_name="__main__")
    return text.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_numbers_are_the_same(program: str) -> None:
    alone = printed(program, {})
    calls = mock.Mock(side_effect=SeqAllToAll4D.apply)
    counted = type("SeqAllToAll4D", (SeqAllToAll4D,), {"apply": staticmethod(calls)})
    assert printed(program, {"SeqAllToAll4D": counted, "SeqAllToAll5D": SeqAllToAll5D}) == alone
    assert calls.call_count >= 4  # query, key, value and result
    assert "max" in alone
