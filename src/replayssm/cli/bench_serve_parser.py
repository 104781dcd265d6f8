"""Words and help of `replayssm bench serve`."""

from __future__ import annotations

from typing import Any

from replayssm.bench.client_request import ClientRequest

EXAMPLES = """\
Works against any server with OpenAI's endpoints. Every request is a stream. Times are the client's: TTFT to the first
text, TPOT per token after it, ITL between chunks of text, E2EL to the end. Tokens are counted by the server (usage);
where it sends none, chunks are counted, and the table says so. A server that merges tokens into one chunk has a larger
ITL for it, not a larger TPOT.

Random prompts differ from load to load, so that no cache helps; those of a dataset come again at each load. A dataset
is lines of JSON with "prompt" or "messages" (and "max_tokens"), or one list of them, or ShareGPT's file.

examples:
  replayssm bench serve --concurrency 1,8,64 --output-tokens 128
  replayssm bench serve --url http://127.0.0.1:30000 --rate 1,2,4,inf --requests 200 --json other.json --plot other.png
  replayssm bench serve --endpoint chat --dataset prompts.jsonl --concurrency 16

exit code: 0 done, 1 a request failed, 2 wrong input
"""


def add_bench_serve(suites: Any) -> None:
    """The command."""
    parser = suites.add_parser(
        "serve",
        help="a running server, ours or another: TTFT, TPOT, ITL, end to end, failures",
        description="Send requests to a server and time its streams.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(request=ClientRequest.from_args, command="bench_serve")
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="default %(default)s")
    server.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    server.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="default %(default)s"
    )
    server.add_argument("--api-key", metavar="KEY", help="default: $REPLAYSSM_API_KEY, $OPENAI_API_KEY")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", metavar="N,…", help="requests at once, one after the other (default 1,8)")
    load.add_argument("--rate", metavar="R,…", help="requests a second instead, at random times; inf is all at once")
    load.add_argument("--requests", type=int, default=64, metavar="N", help="at each load (default %(default)s)")
    load.add_argument("--warm-up", type=int, default=2, metavar="N", help="requests before (default %(default)s)")
    load.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a request (default %(default)g s)")
    work = parser.add_argument_group("requests")
    work.add_argument("--dataset", metavar="FILE", help="prompts (default: random words)")
    work.add_argument("--prompt-words", type=int, default=128, metavar="N", help="default %(default)s")
    work.add_argument("--output-tokens", type=int, default=128, metavar="N", help="at most (default %(default)s)")
    work.add_argument("--ignore-eos", action="store_true", help="always so many, where the server knows ignore_eos")
    work.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default %(default)g")
    work.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, times and sampling (default 0)")
    parser.add_argument("--json", dest="json_file", metavar="FILE", help="write the results; '-' is standard output")
    parser.add_argument("--plot", metavar="FILE", help="against the load (png, svg, pdf)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
