"""What one request asks of the tier, from its ``kv_transfer_params``.

``{"kvtier": {"priority": 80, "skip_read": true, "skip_write": true, "keep_off_nvme": true}}``, and vLLM's own ``kv_load_tiers``, which
arrives as a tier filter. vLLM has already accepted the request by then, and an exception here would end the engine: what cannot be used
is left out, and said once.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

PARAMETERS: Final = "kvtier"
_log = logging.getLogger(__name__)
_said: set[str] = set()


@dataclass(frozen=True)
class Wishes:
    """Attributes as of ``TierIndex.begin_request``."""

    priority: int = 35
    skip_read: bool = False
    skip_write: bool = False
    keep_off_nvme: bool = False


_NONE: Final = Wishes()
_KEYS: Final = ("priority", "skip_read", "skip_write", "keep_off_nvme")


def read_wishes(parameters: Mapping[str, Any] | None) -> Wishes:
    """The wishes in a request's ``kv_transfer_params``; defaults for what is not there or not usable."""
    given = (parameters or {}).get(PARAMETERS)
    if given is None:
        return _NONE
    if not isinstance(given, Mapping):
        _say(f"kv_transfer_params[{PARAMETERS!r}]={given!r}: must be a mapping such as {{'priority': 80}}; left out")
        return _NONE
    wishes = _NONE
    for key, value in given.items():
        if key == "priority" and type(value) is int and 0 <= value <= 100:
            wishes = replace(wishes, priority=value)
        elif key in _KEYS[1:] and isinstance(value, bool):
            wishes = replace(wishes, **{key: value})
        elif key in _KEYS:
            _say(f"kv_transfer_params[{PARAMETERS!r}][{key!r}]={value!r}: must be "
                 f"{'a whole number from 0 to 100' if key == 'priority' else 'true or false'}; left out")
        else:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            _say(f"kv_transfer_params[{PARAMETERS!r}][{key!r}]: unknown key; "
                 + (f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_KEYS)}") + " Left out")
    return wishes


def _say(text: str) -> None:
    """Each text once, and no more than a hundred of them: they come from outside."""
    if text not in _said and len(_said) < 100:
        _said.add(text)
        _log.warning("%s", text)
