"""Timing against the roof: geometries by model name, ceilings of a device, checked and timed rows, a plot.

`replayssm bench decode` puts the parts together. Nothing here imports torch before it has to.
"""
