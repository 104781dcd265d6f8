"""Recurrent states of many requests: a pool of slots with their rings and cursors."""

from replayssm.state.pool import HostState, LayerState, SlotPool

__all__ = ["HostState", "LayerState", "SlotPool"]
