"""How bytes move, not differentiable: plans of collectives, pack and unpack, the collectives eager and compiled."""

__all__: list[str] = []
