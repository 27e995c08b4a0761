"""Pure functions from intermediates, or from any callable that returns them, to numbers."""
