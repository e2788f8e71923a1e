"""``python -m fuselora``."""

from fuselora.cli import main

if __name__ == "__main__":
    main()
