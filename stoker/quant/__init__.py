"""What a block of weights means: formats and the torch reference that every kernel is held to."""
