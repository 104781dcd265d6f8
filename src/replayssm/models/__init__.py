"""Adapters that put the replay layers and cache into transformers models, and the loading of local checkpoints."""
