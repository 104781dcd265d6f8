"""The memory of many requests: slots for recurrent states, pages for attention, and the plan that splits it."""

from replayssm.state.budget import MemoryPlan, plan_memory
from replayssm.state.host import on, upload
from replayssm.state.pages import PagePool, TokenArray
from replayssm.state.pool import HostState, LayerState, SlotPool

__all__ = ["HostState", "LayerState", "MemoryPlan", "PagePool", "SlotPool", "TokenArray", "on", "plan_memory", "upload"]
