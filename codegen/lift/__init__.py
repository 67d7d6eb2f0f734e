"""Low IR to high IR."""
