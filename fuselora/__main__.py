"""The ``fuselora`` command, also ``python -m fuselora``. Light, so that an early Ctrl-C meets it ready."""

from __future__ import annotations

import signal

from fuselora.interrupts import Ending


def main() -> None:
    """Until a command has begun, and once it is over, Ctrl-C has nothing to clean up."""
    signal.signal(signal.SIGINT, Ending())
    from fuselora.cli import run

    run()


if __name__ == "__main__":
    main()
