"""Searching the tile of every kernel: what compiles well, what is fastest on a GPU, and the table that keeps it."""

__all__: list[str] = []
