"""One thin adapter per engine."""
