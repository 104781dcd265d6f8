"""What a checkpoint's state costs: bytes per request, bytes per decode step, requests that fit. Needs no torch.

`checkpoints` is the table of known models, `config` reads any config.json, `lookup` finds either by what the user
typed, `estimate` does the arithmetic, `plot` draws it. `replayssm plan` puts the parts together.
"""
