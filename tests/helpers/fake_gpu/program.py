"""Reads PTX: the only entry of a module as a list of instructions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Instruction", "Program", "PtxError", "parse"]


class PtxError(Exception):
    """An instruction that is not known, or an access that a GPU would refuse or that leaves its buffer."""


@dataclass(frozen=True)
class Instruction:
    """``@guard operation operands`` with the operands as text; ``guard`` is empty, ``%p1`` or ``!%p1``."""

    guard: str
    operation: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """The entry of one PTX module.

    Attributes:
        params: ``(type, name)`` of every parameter, in order.
        instructions: the body.
        labels: index of the instruction that follows a label.
        targets: labels of a table that an instruction jumps by.
        threads: of a block.
    """

    params: tuple[tuple[str, str], ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    threads: int
    targets: Mapping[str, tuple[str, ...]]


def parse(text: str) -> Program:
    """Read the only entry of a module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    head = re.search(r"\.visible \.entry \w+\((.*?)\)(.*?)\{", text, re.DOTALL)
    assert head is not None
    params = tuple(
        (match[1], match[2]) for match in re.finditer(r"\.param \.(\w+)(?:[ .\w]*?) (\w+)(?=,|\s*$)", head[1], re.M)
    )
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", head[2])
    assert threads is not None
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    body = text[head.end() : text.rindex("ret;") + 4]
    tables = re.compile(r"([$\w]+):\s*\.branchtargets\s([^;]*);")
    targets = {match[1]: tuple(re.findall(r"[$\w]+", match[2])) for match in tables.finditer(body)}
    body = tables.sub("", body)
    for line in body.splitlines():
        for part in line.split(";"):
            statement = part.strip().lstrip("{} ")
            label = re.match(r"([$\w]+):$", statement)
            if label:
                labels[label[1]] = len(instructions)
            elif statement and not statement.startswith((".", "{", "}")):
                instructions.append(_instruction(statement))
    return Program(params, tuple(instructions), labels, int(threads[1]), targets)


def _instruction(statement: str) -> Instruction:
    match = re.match(r"(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", statement, re.DOTALL)
    if match is None:
        raise PtxError(f"cannot read {statement!r}")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", match[3])
    return Instruction(match[1] or "", match[2], tuple(operands))
