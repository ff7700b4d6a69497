"""`python -m drivetrain`, which is also what torchrun starts: `torchrun ... -m drivetrain train ...`."""

from drivetrain.cli import main

if __name__ == "__main__":
    main()
