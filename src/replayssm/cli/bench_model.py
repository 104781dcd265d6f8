"""The model of a suite of `replayssm bench` that runs the engine."""

from __future__ import annotations

import torch
from transformers import logging as transformers_logging

from replayssm.bench import serving_model
from replayssm.bench.serving_request import ServingRequest
from replayssm.cli.console import step
from replayssm.models.loading import LoadedModel


def load_for(request: ServingRequest, where: torch.device) -> tuple[serving_model.Plan, int, LoadedModel]:
    """What it is, the longest request that engines are set up for, and the model.

    Raises `OptionError` before anything is loaded when the requests are too long.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    plan = serving_model.plan(request)
    context = request.context(plan.positions)
    with step(f"{'random weights of' if plan.random else 'loading'} {plan.name}"):
        return plan, context, serving_model.make(request, plan, where)
