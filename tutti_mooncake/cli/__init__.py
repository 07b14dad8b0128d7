"""The command `tutti`: makes, shows, checks and empties pools, and says what this machine can do."""

from tutti_mooncake.cli.main import main

__all__ = ["main"]
