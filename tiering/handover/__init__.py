"""Blocks that one process has computed, handed over to another on the same machine: prefill here, decode there."""
