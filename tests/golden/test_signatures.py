"""What callers may leave out, and shared constants, are what they were: signatures.json."""

import json

from tests.golden import signatures


def test_defaults_and_shared_constants_are_what_they_were() -> None:
    written = json.loads(signatures.FILE.read_text())
    found = signatures.signatures()
    changed = [name for name in {**written, **found} if written.get(name) != found.get(name)]
    assert changed == [], "if that is meant, python -m tests.golden.signatures --write"
