"""Many requests on one model: scheduler, runner, sampler, and the `LLM` interface."""
