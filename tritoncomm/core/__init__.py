"""Movement of bytes, not differentiable: plans of collectives, pack and unpack, eager and compiled collectives."""

__all__: list[str] = []
