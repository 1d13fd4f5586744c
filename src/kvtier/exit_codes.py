"""What the commands end with.

1 is for what was looked at and did not hold, also where nobody answered; 2 for what the user wrote. Ctrl-C and SIGTERM have the shell's
own codes.
"""

from typing import Final

FINE: Final = 0
CHECK_FAILED: Final = 1
USED_WRONGLY: Final = 2
INTERRUPTED: Final = 130  # typer's own code for Ctrl-C: 128 + SIGINT
TERMINATED: Final = 143   # 128 + SIGTERM
