"""A life whose clocks jump: `python -m benchmarks.faults.clock LIFE.json STEP SECONDS [STEP SECONDS …]`.

`time.time` and `time.monotonic` are replaced before anything is imported that could have kept them.
"""

import sys
import time


class Clock:
    """A clock that can be moved by any number of seconds."""

    moved = 0.0

    def __init__(self, name: str):
        self._real = getattr(time, name)
        setattr(time, name, self)

    def __call__(self) -> float:
        return self._real() + Clock.moved


def main(life: str, *jumps: str) -> None:
    """Live, and before each step of a number move both clocks."""
    for name in ("time", "monotonic"):
        Clock(name)
    from benchmarks.faults.child import live, read_life

    at = dict(zip(map(int, jumps[::2]), map(float, jumps[1::2]), strict=True))

    def move(number: int) -> None:
        Clock.moved += at.get(number, 0.0)

    live(read_life(life), before_step=move)


if __name__ == "__main__":
    main(*sys.argv[1:])
