"""Studies of accuracy: what a state dtype, a ring and a rounding cost, on random layers and on the shipped models.

`drift` and `rounding` follow one layer for thousands of steps, `text` and `accuracy` whole models. Each returns rows
for JSON; `tables`, `claims` and `plot` say what they mean.
"""
