"""tools/commands."""
