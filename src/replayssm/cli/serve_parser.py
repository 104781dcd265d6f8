"""Words and help of `replayssm serve`."""

from __future__ import annotations

import argparse
from typing import Any

from replayssm.cli.serve_options import GROUPS
from replayssm.cli.serve_request import ServeRequest

SERVE_EXAMPLES = """\
The endpoints are OpenAI's: /v1/models, /v1/completions, /v1/chat/completions; besides /tokenize, /detokenize, /health
(503 until the model is loaded), /metrics for Prometheus, and a page at /. SIGTERM takes no more requests and lets those
that run end.

Options of a YAML file have the same names ("max-requests: 64"); the command line is stronger than the file, the file
stronger than defaults. A key in $REPLAYSSM_API_KEY is not seen in the list of processes.

examples:
  replayssm serve gdn
  replayssm serve ./Qwen3.5-4B --dtype bfloat16 --prefix-cache --host 0.0.0.0 --api-key "$KEY"
  replayssm serve --config serve.yaml --port 9000
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once", "max_tokens": 20}'

exit code: 0 stopped by SIGTERM, 2 wrong input, 70 the engine failed, 130 interrupted
"""


def add_serve(commands: Any) -> None:
    """The command."""
    parser = commands.add_parser(
        "serve",
        help="an HTTP server with OpenAI's endpoints",
        description="Serve a model by HTTP, with OpenAI's endpoints, to many clients at once.",
        epilog=SERVE_EXAMPLES,
    )
    parser.set_defaults(request=ServeRequest.from_args, json=False)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a shipped name or a folder (default gdn)")
    parser.add_argument("--config", metavar="FILE", help="options in YAML")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            if option.kind is bool:
                group.add_argument(f"--{option.name}", action=argparse.BooleanOptionalAction, help=option.help)
            else:
                group.add_argument(
                    f"--{option.name}", type=option.kind, metavar=option.metavar, choices=option.choices,
                    help=option.help,
                )  # fmt: skip
