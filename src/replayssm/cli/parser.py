"""The command line's words, defaults and help. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from replayssm import __version__
from replayssm.bench.request import BenchRequest
from replayssm.cli.options import CheckRequest, GenerateRequest
from replayssm.errors import OptionError
from replayssm.spec import DEFAULT_RING_LEN, RING_LEN_MAX, RING_LEN_MIN

DEFAULT_MODEL = "gdn"
DEFAULT_MAX_TOKENS = 200
DEFAULT_CHECK_TOKENS = 64

MAIN_EXAMPLES = """\
examples:
  replayssm generate                       the shipped model continues a sample prompt
  replayssm generate ./Qwen3.5-0.8B --prompt "The tide" --max-tokens 64
  replayssm check gdn                      every linear layer against an fp64 oracle
  replayssm bench decode --quick           packed and replay decode against the memory ceilings
  replayssm env                            versions, devices, backend, state dtype
"""

GENERATE_EXAMPLES = """\
Decoding is greedy unless --temperature, --top-k or --top-p is given; the sampling seed is then 0 unless --seed says
otherwise. The prompt is continued as plain text: no chat template is applied.

After the text the same prompt is decoded again by packed decode and by stock transformers, from the same seed. The
tokens must be equal; a first difference within the numerical noise of the model counts as a near-tie and is named.

examples:
  replayssm generate gdn --prompt "In the beginning" --max-tokens 100
  replayssm generate gdn --temperature 0.8 --top-p 0.95 --seed 7
  cat letter.txt | replayssm generate gdn --prompt-file - --quiet
  replayssm generate gdn --state-dtype fp16 --ring-len 32
  replayssm generate gdn --json --quiet | python3 -m json.tool

exit code: 0 equal or near-tie (or --no-check), 1 tokens differ, 2 wrong input
"""

CHECK_EXAMPLES = """\
The model decodes a prompt once; what each of its linear layers receives at each step is recorded. A serial recurrence
in double precision, packed decode and replay decode then run on the same records. The table shows the relative error
(Frobenius norm) of outputs and of the folded state. "drift" is the state error for each state dtype.

examples:
  replayssm check gdn
  replayssm check gdn --tokens 256 --ring-len 16
  replayssm check ./Qwen3.5-0.8B --dtype bfloat16 --layers worst

exit code: 0 all within their limits, 1 a limit exceeded, 2 wrong input
"""

BENCH_EXAMPLES = """\
The ceilings of the device come first: a pure read, an in-place read+write, the cost of a launch. Then packed decode,
replay decode and what other packages offer, one layer and one token a row. Each row is first checked against a serial
fp64 recurrence at the size that is timed; without a passed check there is no number. A sample is a whole ring period
with its flushes, the rows spread over all phases; GB/s count the bytes that the algorithm must move.

examples:
  replayssm bench decode --quick
  replayssm bench decode --model Qwen3.5-9B --state-dtype fp32,bf16 --json out.json --plot out.png
  replayssm bench decode --kind kda --heads 32/32 --dims 128/128 --batch 8,64 --ring-len 10
  replayssm bench decode --quick --json - | python3 -m json.tool

exit code: 0 done, 1 a row failed its check, 2 wrong input
"""

ENV_EXAMPLES = """\
examples:
  replayssm env
  REPLAYSSM_STATE_DTYPE=fp16 replayssm env
  replayssm env --json
"""


class Parser(argparse.ArgumentParser):
    """Raises `OptionError` instead of printing usage and leaving the process."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**kwargs)

    def error(self, message: str) -> NoReturn:
        """One line for `main` to print."""
        raise OptionError(f"{message} (see `{self.prog} --help`)")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line.

    `args.command` names the module of `replayssm.cli` that runs it, `args.request` makes its checked input from args.
    """
    parser = Parser(
        prog="replayssm",
        description="Replay decode for hybrid linear-attention language models: read the recurrent state, do not write "
        "it.",
        epilog=MAIN_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"replayssm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    common = Parser(add_help=False)
    common.add_argument(
        "--json", action="store_true", help="print only one line of JSON on stdout; text and tables go to stderr"
    )
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    _generate(commands, common)
    _check(commands, common)
    _bench(commands)
    env = commands.add_parser(
        "env",
        parents=[common],
        help="versions, devices, backend, state dtype policy, shipped models",
        description="Show what decode would run on here, and why.",
        epilog=ENV_EXAMPLES,
    )
    env.set_defaults(request=lambda args: args)
    return parser


def _generate(commands: Any, common: Parser) -> None:
    parser = commands.add_parser(
        "generate",
        parents=[common],
        help="generate text, then compare with packed and stock decode",
        description="Generate text with replay decode and account for the bytes it moved.",
        epilog=GENERATE_EXAMPLES,
    )
    parser.set_defaults(request=GenerateRequest.from_args)
    _model(parser)
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default %(default)s")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--greedy", action="store_true", help="take the likeliest token (the default)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="> 0; 0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest of total mass P")
    sampling.add_argument("--seed", type=int, metavar="N", help="seed of the sampling, >= 0 (default 0)")
    _decode(parser)
    parser.add_argument("--no-replay", action="store_true", help="packed decode: read and write the state every step")
    parser.add_argument("--no-check", action="store_true", help="do not decode again for comparison")
    parser.add_argument("--quiet", action="store_true", help="the text only: no prompt, progress or summary")


def _check(commands: Any, common: Parser) -> None:
    parser = commands.add_parser(
        "check",
        parents=[common],
        help="every linear layer: replay and packed decode against an fp64 oracle",
        description="Compare replay and packed decode with a serial fp64 recurrence on a model's own layers.",
        epilog=CHECK_EXAMPLES,
    )
    parser.set_defaults(request=CheckRequest.from_args)
    _model(parser)
    parser.add_argument(
        "--tokens", type=int, default=DEFAULT_CHECK_TOKENS, metavar="N", help="decode steps (default %(default)s)"
    )
    parser.add_argument(
        "--layers", choices=("all", "worst"), default="all", help="a row per layer, or the worst of each column"
    )
    _decode(parser)


def _bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="time decode against the memory ceilings", description="Time decode against the memory ceilings."
    )
    suites = bench.add_subparsers(dest="suite", required=True, metavar="SUITE", parser_class=Parser)
    parser = suites.add_parser(
        "decode",
        help="packed and replay decode of one layer, and peers",
        description="Time one token a row through one linear-attention layer, by packed and by replay decode.",
        epilog=BENCH_EXAMPLES,
    )
    parser.set_defaults(request=BenchRequest.from_args)
    layer = parser.add_argument_group("layer")
    layer.add_argument("--model", metavar="NAME", help="geometry of a known checkpoint, as in Qwen3.5-9B")
    layer.add_argument("--kind", metavar="KIND", help="gdn or kda (default gdn)")
    layer.add_argument("--heads", metavar="H/HV", help="key and value heads (default gdn 16/32, kda 32/32)")
    layer.add_argument("--dims", metavar="K/V", help="key and value dim of a head, up to 256 (default 128/128)")
    parser.add_argument("--batch", metavar="B,…", help="batch sizes (default 1,8,64,256; with --quick 1,8)")
    parser.add_argument(
        "--ring-len",
        type=int,
        default=DEFAULT_RING_LEN,
        metavar="L",
        help=f"decode steps between two writes of the state, {RING_LEN_MIN}…{RING_LEN_MAX} (default %(default)s)",
    )
    parser.add_argument(
        "--state-dtype", default="float32", metavar="D,…", help="fp32, bf16, fp16, or several (default %(default)s)"
    )
    parser.add_argument(
        "--io-dtype", default="bfloat16", metavar="D", help="of the activations: fp32, bf16, fp16 (default %(default)s)"
    )
    parser.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1 … (default: cuda where there is one)")
    parser.add_argument("--quick", action="store_true", help="fewer samples, smaller buffers: for a first look")
    parser.add_argument("--json", dest="json_file", metavar="FILE", help="write the results; '-' is standard output")
    parser.add_argument("--plot", metavar="FILE", help="time and fraction of the ceiling against batch (png, svg, pdf)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="a shipped name or a folder (default gdn)"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue (default: a sample)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from FILE, '-' is standard input")


def _decode(parser: argparse.ArgumentParser) -> None:
    decode = parser.add_argument_group("decode")
    decode.add_argument(
        "--ring-len",
        type=int,
        default=DEFAULT_RING_LEN,
        metavar="L",
        help=f"decode steps between two writes of the state, {RING_LEN_MIN}…{RING_LEN_MAX} (default %(default)s)",
    )
    decode.add_argument(
        "--state-dtype",
        metavar="D",
        help="float32 (fp32), bfloat16 (bf16) or float16 (fp16); default: $REPLAYSSM_STATE_DTYPE, the model config's "
        "mamba_ssm_dtype, float32",
    )
    decode.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "auto"),
        default="float32",
        help="of the model's weights and activations (default float32; auto: as stored)",
    )
    decode.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1 … (default: cuda where there is one)")
