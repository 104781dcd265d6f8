"""The `replayssm` command: generate, check, bench, env. Only the chosen sub-command imports torch."""

from replayssm.cli.app import main

__all__ = ["main"]
