"""Claims about caches: every one is bounded and on the page, and none keeps a group, a mesh, a tensor or a model."""

import gc
import re
import weakref
from typing import Any

import cache_table
import pytest
import torch.distributed as dist
from jobs import run_job
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritoncomm.groups import as_group

# Objects with memory of their own. A class or a function of a module is none, nor a device.
_OWNERS = re.compile(r"\b(ProcessGroup|TorchGroup|DeviceMesh|Tensor|Module|Parameter|Optimizer)\b")
# Parameters without a kind: numbers and texts of a call, and the function of a class.
_OF_ANY_KIND = {
    "debug.descriptor._describe": {"shape", "dtype", "arguments"},
    "integrations.transformers.loss_terms._arithmetic": {"function"},
    "integrations.transformers.loss_terms.source_text": {"function"},
    "integrations.transformers.model_parts._embedding_callees": {"forward"},
}


def test_the_page_is_that_of_the_code() -> None:
    assert cache_table.PAGE.read_text() == cache_table.page(), "python tools/cache_table.py --write"


@pytest.mark.parametrize("cache", cache_table.caches(), ids=lambda cache: cache.name)
def test_a_cache_is_bounded_and_keeps_nobody_alive(cache: cache_table.Cache) -> None:
    assert cache.entries.isdigit() or cache.entries == "one a key"
    if cache.owner != "process":
        return
    kinds = {part.partition(": ")[0]: part.partition(": ")[2] for part in cache.key}
    assert not [name for name, kind in kinds.items() if _OWNERS.search(re.sub(r"type\[[\w.]+\]", "", kind))]
    assert {name for name, kind in kinds.items() if kind == "Any" or "Any, ..." in kind} == _OF_ANY_KIND.get(
        cache.name, set()
    )


def test_the_tool_sees_every_way_to_make_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    folder = tmp_path / "tritoncomm"
    folder.mkdir()
    (folder / "new.py").write_text(
        "@lru_cache(maxsize=_MOST)\ndef f(x: int, y): ...\n_MOST = 7\n@cache\ndef g(): ...\n@cache\ndef h(x): ...\n"
        "_kept = lru_cache(maxsize=3)\nk = _kept(f)\nm: 'PerGroup[int]' = PerGroup()\n"
        "w: 'WeakKeyDictionary[nn.Module, int]' = WeakKeyDictionary()\n"
    )
    monkeypatch.setattr(cache_table, "ROOT", tmp_path)
    assert cache_table.caches() == [
        ("new.f", ("x: int", "y"), "7", "process"),
        ("new.g", (), "1", "process"),
        ("new.h", ("x",), "unbounded", "process"),
        ("new.k", ("x: int", "y"), "3", "process"),
        ("new.m", ("ProcessGroup",), "one a key", "its key"),
        ("new.w", ("nn.Module",), "one a key", "its key"),
    ]


def destroy_used_mesh() -> list[bool]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    group = as_group((mesh, "tensor"), "f")
    assert as_group((mesh, "tensor"), "f") is group
    references = [weakref.ref(mesh), weakref.ref(group)]
    dist.destroy_process_group()
    del mesh, group
    gc.collect()
    return [reference() is None for reference in references]


def test_a_mesh_and_its_groups_are_freed() -> None:
    assert run_job(destroy_used_mesh, [{}]) == [[True, True]]
