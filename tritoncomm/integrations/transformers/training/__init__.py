"""Parts of ``UlyssesTrainerMixin``: lanes of data, a strategy for each kind of loss, and TRL's trainers."""

__all__: list[str] = []
