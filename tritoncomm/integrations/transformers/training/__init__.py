"""What ``UlyssesTrainerMixin`` is made of: lanes of data, a strategy for each kind of loss, and trainers of TRL."""

__all__: list[str] = []
