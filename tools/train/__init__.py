"""tools/train."""
