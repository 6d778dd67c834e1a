"""Search of the tile of every kernel: candidates judged by machine code, timed on a GPU, kept in a table."""

__all__: list[str] = []
