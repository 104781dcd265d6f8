"""The command line's words, defaults and help. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from replayssm import __version__
from replayssm.bench.request import BenchRequest
from replayssm.cli.options import COUNT, CheckRequest, GenerateRequest, StudyRequest, TaskRequest
from replayssm.errors import OptionError
from replayssm.planner.request import PlanRequest
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
  replayssm study numerics --quick         errors of state dtypes and ring lengths
  replayssm plan Qwen3.5-9B --memory 80GB  bytes per request and step, requests that fit; runs nothing
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

STUDY_EXAMPLES = """\
examples:
  replayssm study numerics --quick
  replayssm study numerics --out docs/numerics
  replayssm study numerics --models none --steps 2048
  replayssm study numerics --from docs/numerics/numerics.json

exit code: 0 done, whatever was found; 2 wrong input
"""

PLAN_EXAMPLES = """\
MODEL is a known checkpoint, a config.json, a folder that has one, or a shipped name. Nothing is loaded and nothing is
fetched. Bytes of a step are those of the states and rings: `ops.count_traffic()` counts the same in a run. A request
holds the state and the conv's inputs of each linear layer, the keys and values of each attention layer for --context
tokens, and with replay the ring. With --tp all figures are those of one shard.

SIZE has a unit: 80GiB is 80·2^30 bytes, 80GB and 80G are 80·10^9.

examples:
  replayssm plan Qwen3.5-9B
  replayssm plan Kimi-Linear-48B-A3B --batch 1,64 --ring-len 10 --state-dtype bf16 --plot kimi.png
  replayssm plan Qwen3-Next-80B-A3B --tp 4 --memory 141GB --reserve 10GB --context 32768 --draft-tokens 4
  replayssm plan ./Qwen3.5-0.8B/config.json --memory 24GiB --weights 1.7GB
  replayssm plan gdn --json | python3 -m json.tool

exit code: 0 done, 2 wrong input
"""

TASK_EXAMPLES = """\
The task stands in for benchmarks of worked answers: every line of a solution needs the line before, so that an error
spoils what follows. The models were trained on other problems of the same kind. Intervals are Wilson's, of 95 %.

examples:
  replayssm study task --count 100
  replayssm study task --models gdn --device cpu --json | python3 -m json.tool

exit code: 0 done, whatever the scores; 2 wrong input
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
    _study(commands, common)
    _plan(commands, common)
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
    _ring_len(parser)
    parser.add_argument(
        "--state-dtype", default="float32", metavar="D,…", help="fp32, bf16, fp16, or several (default %(default)s)"
    )
    parser.add_argument(
        "--io-dtype", default="bfloat16", metavar="D", help="of the activations: fp32, bf16, fp16 (default %(default)s)"
    )
    _device(parser)
    parser.add_argument("--quick", action="store_true", help="fewer samples, smaller buffers: for a first look")
    parser.add_argument("--json", dest="json_file", metavar="FILE", help="write the results; '-' is standard output")
    parser.add_argument("--plot", metavar="FILE", help="time and fraction of the ceiling against batch (png, svg, pdf)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _study(commands: Any, common: Parser) -> None:
    study = commands.add_parser(
        "study", help="what state dtypes, rings and roundings cost", description="Measure what accuracy costs and buys."
    )
    suites = study.add_subparsers(dest="suite", required=True, metavar="SUITE", parser_class=Parser)
    parser = suites.add_parser(
        "numerics",
        parents=[common],
        help="errors against fp64, and what they do to the shipped models",
        description="Errors of packed and replay decode against fp64 over thousands of steps, by state dtype and ring "
        "length; the cost of rounded tensor-core operands; bits per byte, agreement and repetition of models.",
        epilog=STUDY_EXAMPLES,
    )
    parser.set_defaults(request=StudyRequest.from_args)
    parser.add_argument("--steps", type=int, metavar="T", help="of one layer (default 8192; with --quick 512)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each of 8 rows (default 512; with --quick 32)")
    parser.add_argument("--models", metavar="M,…", help="names or folders; none for none (default: all shipped)")
    parser.add_argument("--text", metavar="FILE", help="held-out text (default: chapters kept from the shipped models)")
    _device(parser)
    parser.add_argument("--out", metavar="FOLDER", help="write numerics.json and the plots there")
    parser.add_argument("--from", dest="source", metavar="FILE", help="show the tables of an earlier numerics.json")
    parser.add_argument("--quick", action="store_true", help="few steps and tokens: for a first look")
    parser = suites.add_parser(
        "task",
        parents=[common],
        help="exact scores on sums with worked steps",
        description="Score models on held-out sums with worked steps, by stock, packed and replay decode and for each "
        "state dtype.",
        epilog=TASK_EXAMPLES,
    )
    parser.set_defaults(request=TaskRequest.from_args)
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help="problems (default %(default)s)")
    parser.add_argument("--models", metavar="M,…", help="names or folders (default: all shipped)")
    _device(parser)
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")


def _plan(commands: Any, common: Parser) -> None:
    parser = commands.add_parser(
        "plan",
        parents=[common],
        help="bytes per request and per step, and how many requests fit",
        description="Estimate from a model's config what its states cost, packed and with a ring. Runs no model.",
        epilog=PLAN_EXAMPLES,
    )
    parser.set_defaults(request=PlanRequest.from_args)
    parser.add_argument("model", metavar="MODEL", help="a known checkpoint, a config.json, a folder, a shipped name")
    parser.add_argument("--batch", default="1", metavar="B,…", help="rows of a decode step (default %(default)s)")
    parser.add_argument(
        "--ring-len",
        type=int,
        default=DEFAULT_RING_LEN,
        metavar="L",
        help=f"records of a ring, {RING_LEN_MIN}…{RING_LEN_MAX} (default %(default)s)",
    )
    dtypes = parser.add_argument_group("dtypes")
    dtypes.add_argument(
        "--state-dtype",
        metavar="D",
        help="fp32, bf16, fp16; default: $REPLAYSSM_STATE_DTYPE, the config's mamba_ssm_dtype, float32",
    )
    dtypes.add_argument("--io-dtype", default="bfloat16", metavar="D", help="of the activations (default %(default)s)")
    dtypes.add_argument("--kv-dtype", default="bfloat16", metavar="D", help="or fp8 (default %(default)s)")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--context", type=int, default=4096, metavar="N", help="cached tokens of a request (default %(default)s)"
    )
    memory.add_argument("--memory", metavar="SIZE", help="of one GPU: say how many requests fit")
    memory.add_argument("--weights", metavar="SIZE", help="of the whole model (default: the name's, or the folder's)")
    memory.add_argument("--reserve", metavar="SIZE", help="keep free for activations and the like (default 0)")
    memory.add_argument("--draft-tokens", type=int, default=0, metavar="T", help="speculation: tokens checked at once")
    memory.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel shards (default %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="bytes of a step against the ring length (png, svg, pdf)")


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="a shipped name or a folder (default gdn)"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue (default: a sample)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from FILE, '-' is standard input")


def _decode(parser: argparse.ArgumentParser) -> None:
    decode = parser.add_argument_group("decode")
    _ring_len(decode)
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
    _device(decode)


def _device(parser: Any) -> None:
    parser.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1 … (default: cuda where there is one)")


def _ring_len(parser: Any) -> None:
    parser.add_argument(
        "--ring-len",
        type=int,
        default=DEFAULT_RING_LEN,
        metavar="L",
        help=f"decode steps between two writes of the state, {RING_LEN_MIN}…{RING_LEN_MAX} (default %(default)s)",
    )
