"""How long a recorded run takes on a chip: prices, dependencies, playback, and what to read off.

For nki_sim.launch, which offers `Run.timeline`, and for whoever has a trace. It reads the trace and
`hardware.py` alone: meaning and time are apart.
"""

from nki_sim.time.timeline import Timeline, schedule

__all__ = ["Timeline", "schedule"]
