"""drivetrain: trains vision-language-action robot policies on LeRobot data and measures them in simulation."""

__version__ = "0.1.0"
