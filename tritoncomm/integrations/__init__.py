"""tritoncomm under the names and signatures of other frameworks."""

__all__: list[str] = []
