"""Documents with something wrong: JSON that anybody may have written."""

import copy
import json
import random
from typing import Any

__all__ = ["HOSTILE", "nodes", "spoiled"]

HOSTILE = (
    None, True, False, 0, 1, -1, 3, 64, 2**17, 2**31, 2**63, 10**400, -(10**30), 0.5, 1e308, float("nan"), float("inf"),
    "", "16", "pack", "\ud800", "x" * 5000, "\n", [], [1], [[]], {}, {"16": 1}, {"pack": {}}, {"tile_bytes": 64},
)  # fmt: skip


def nodes(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    places = [(content, key) for key in keys]
    return places + [node for key in keys for node in nodes(content[key])]


def spoiled(content: Any, drawn: random.Random, names: tuple[str, ...]) -> bytes:
    """A document with one to three changes to its structure or to its bytes; ``names`` are keys to rename others to."""
    content = copy.deepcopy(content)
    kind = drawn.choice(("value", "value", "value", "delete", "rename", "bytes", "short", "nest"))
    for _ in range(drawn.randint(1, 3)):
        places = nodes(content)
        if kind not in ("value", "delete", "rename") or not places:
            break
        holder, key = drawn.choice(places)
        if kind == "value":
            holder[key] = copy.deepcopy(drawn.choice(HOSTILE))
        elif kind == "delete" or isinstance(holder, list):
            del holder[key]
        else:
            holder[drawn.choice((*names, "", "\ud800"))] = holder.pop(key)
    if kind == "nest":
        deep, last = drawn.choice((10, 500, 5000, 100_000)), list(content)[-1]
        text = json.dumps({**content, last: 0}).encode()
        return text.removesuffix(b"0}") + b"[" * deep + b"]" * deep + b"}"
    text = json.dumps(content).encode()
    if kind == "bytes":
        changed = bytearray(text)
        for _ in range(drawn.randint(1, 5)):
            changed[drawn.randrange(len(changed))] = drawn.randrange(256)
        return bytes(changed)
    return text[: drawn.randrange(len(text))] if kind == "short" else text
