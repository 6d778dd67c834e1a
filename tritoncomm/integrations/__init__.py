"""tritoncomm under other frameworks. Every module names one framework, and imports it at its first call only."""

__all__: list[str] = []
