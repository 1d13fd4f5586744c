"""``TierPulse``: one bad beat is not the last one."""

from __future__ import annotations

from tier_rig import until

from kvtier.tiering.tier_pulse import TierPulse


def test_a_beat_that_fails_in_whatever_way_is_followed_by_others() -> None:
    beats: list[int] = []

    def beat() -> bool:
        beats.append(len(beats))
        if len(beats) < 3:
            raise OSError("trouble")
        return True

    pulse = TierPulse(beat, "pulse")
    try:
        until(lambda: len(beats) > 4)
    finally:
        assert pulse.close(5.0)
