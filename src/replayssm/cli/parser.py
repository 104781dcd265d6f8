"""The command line's words, defaults and help. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from replayssm import __version__
from replayssm.bench.request import BenchRequest
from replayssm.bench.serving_configs import CONFIGS
from replayssm.bench.serving_request import LatencyRequest, ThroughputRequest
from replayssm.cli.bench_prefix_parser import add_bench_prefix
from replayssm.cli.bench_serve_parser import add_bench_serve
from replayssm.cli.bench_spec_parser import add_bench_spec
from replayssm.cli.generate_parser import GENERATE_EXAMPLES, add_engine, add_prompts, add_sampling, add_switches
from replayssm.cli.generate_request import GenerateRequest
from replayssm.cli.options import COUNT, CheckRequest, StudyRequest, TaskRequest
from replayssm.cli.serve_parser import add_serve
from replayssm.engine.options import EngineOptions
from replayssm.errors import OptionError
from replayssm.planner.request import PlanRequest
from replayssm.spec import DEFAULT_RING_LEN, RING_LEN_MAX, RING_LEN_MIN, ring_for
from replayssm.study.task import SETS

DEFAULT_MODEL = "gdn"
DEFAULT_CHECK_TOKENS = 64

MAIN_EXAMPLES = """\
examples:
  replayssm generate                       the shipped model continues a sample prompt
  replayssm generate ./Qwen3.5-0.8B --prompt "The tide" --max-tokens 64
  replayssm serve gdn                      an HTTP server with OpenAI's endpoints
  replayssm check gdn                      every linear layer against an fp64 oracle
  replayssm bench decode --quick           packed and replay decode against the memory ceilings
  replayssm bench throughput gdn           the engine: tokens a second, replay and packed
  replayssm study numerics --quick         errors of state dtypes and ring lengths
  replayssm plan Qwen3.5-9B --memory 80GB  bytes per request and step, requests that fit; runs nothing
  replayssm env                            versions, devices, backend, state dtype
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

SERVING_EXAMPLES = """\
Every mode has an engine of its own; nothing else changes between them. Before a number, an equal run warms up and is
checked: a few requests must say what packed decode says, up to near-ties, which are named. Without a passed check there
is no number. Prompts are random tokens, answers greedy and of full length.

--config makes random weights on the device from a model's dimensions: {configs}, or any
config.json. {more}

examples:
{examples}

exit code: 0 done, 1 a row failed its check, 2 wrong input
"""

THROUGHPUT_MORE = """All requests of a batch start at once. TPOT and decode tokens/s are of the steps in which all of
them decode, a whole number of ring periods."""

THROUGHPUT_EXAMPLES = """\
  replayssm bench throughput gdn --batch 1,4 --prompt-tokens 16 --output-tokens 32
  replayssm bench throughput --config Qwen3.5-4B --batch 1,8,32,128,256 --json out.json --plot out.png
  replayssm bench throughput --config Kimi-Linear-48B-A3B --layers 8 --mode replay,packed --state-dtype fp32,bf16"""

LATENCY_MORE = """Requests arrive at random, --rate of them a second on average; a request that waits for its
turn has arrived already."""

LATENCY_EXAMPLES = """\
  replayssm bench latency gdn --rate 2,inf --requests 8 --prompt-tokens 16 --output-tokens 32
  replayssm bench latency --config Qwen3.5-4B --rate 4,16,64 --requests 256 --json out.json --plot out.png"""

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

With --spec N a step verifies windows of N + 1 tokens. The table shows what the engine holds for each way to do that,
and how many requests fit where one fits that keeps a state for each token (snapshot).

SIZE has a unit: 80GiB is 80·2^30 bytes, 80GB and 80G are 80·10^9.

examples:
  replayssm plan Qwen3.5-9B
  replayssm plan Qwen3.5-122B-A10B --tp 2 --memory 141GB --spec 4
  replayssm plan Kimi-Linear-48B-A3B --batch 1,64 --ring-len 10 --state-dtype bf16 --plot kimi.png
  replayssm plan Qwen3-Next-80B-A3B --tp 4 --memory 141GB --reserve 10GB --context 32768 --spec 4
  replayssm plan ./Qwen3.5-0.8B/config.json --memory 24GiB --weights 1.7GB
  replayssm plan gdn --json | python3 -m json.tool

exit code: 0 done, 2 wrong input
"""

TASK_EXAMPLES = """\
The task stands in for benchmarks of worked answers: every line of a solution needs the line before, so that an error
spoils what follows. The models were trained on other problems of the same kind, and solve those of the set "usual":
3 to 10 numbers up to 9 or 99. In "large", 10 numbers from 80 to 99, they meet totals that they hardly know.

Intervals are Wilson's, of 95 %. "lost" and "gained" are problems that packed decode with an fp32 state solves and the
row does not, or the other way round; "changed" are completions that differ from its.

examples:
  replayssm study task --count 100
  replayssm study task --sets large --models gdn --device cpu --json | python3 -m json.tool

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
    add_serve(commands)
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
        help="generate text, then compare with packed and stock decode; or answer a file of prompts",
        description="Generate text with replay decode and account for the bytes it moved; or answer a file of prompts.",
        epilog=GENERATE_EXAMPLES,
    )
    parser.set_defaults(request=GenerateRequest.from_args)
    add_prompts(_model(parser))
    add_sampling(parser)
    _decode(parser, None, f"default {DEFAULT_RING_LEN}; {ring_for(EngineOptions.spec_tokens + 1)} with --spec")
    add_engine(parser)
    add_switches(parser)


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
        "bench",
        help="time decode against the memory ceilings, or the engine under load",
        description="Time decode against the memory ceilings, or the engine under load.",
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

    _throughput(suites)
    _latency(suites)
    add_bench_serve(suites)
    add_bench_spec(suites, _serving)
    add_bench_prefix(suites, _serving)


def _throughput(suites: Any) -> None:
    parser = suites.add_parser(
        "throughput",
        help="the engine with N requests at once: tokens a second, TPOT, TTFT",
        description="Tokens a second of the engine at each number of requests at once, replay against packed decode.",
        epilog=_serving_epilog(THROUGHPUT_MORE, THROUGHPUT_EXAMPLES),
    )
    parser.set_defaults(request=ThroughputRequest.from_args)
    parser.add_argument(
        "--batch", default="1,8,32,64,128,256", metavar="B,…", help="requests at once (default %(default)s)"
    )
    _serving(parser)


def _latency(suites: Any) -> None:
    parser = suites.add_parser(
        "latency",
        help="the engine with requests that arrive at a rate: TTFT, TPOT, ITL, end to end",
        description="Latencies of requests that arrive at a given rate, replay against packed decode.",
        epilog=_serving_epilog(LATENCY_MORE, LATENCY_EXAMPLES),
    )
    parser.set_defaults(request=LatencyRequest.from_args)
    parser.add_argument(
        "--rate", default="inf", metavar="R,…", help="requests a second; inf is all at once (default %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="at each rate (default %(default)s)")
    parser.add_argument(
        "--max-requests", type=int, metavar="N", help="that run at once (default: what the memory holds)"
    )
    _serving(parser)


def _serving_epilog(more: str, examples: str) -> str:
    return SERVING_EXAMPLES.format(configs=", ".join(CONFIGS), more=more, examples=examples)


def _serving(parser: argparse.ArgumentParser) -> None:
    """What `throughput` and `latency` share."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a shipped name or a folder (default gdn)")
    random = parser.add_argument_group("random weights")
    random.add_argument("--config", metavar="NAME", help="instead of MODEL: a known name, a config.json or its folder")
    random.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="default %(default)s")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--mode", default="auto,packed", metavar="M,…", help="auto, replay, packed, or several (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, arrivals and weights (default 0)")
    decode = parser.add_argument_group("decode")
    _ring_len(decode)
    decode.add_argument(
        "--state-dtype", default="float32", metavar="D,…", help="fp32, bf16, fp16, or several (default %(default)s)"
    )
    decode.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations (default float32, with --config bfloat16)",
    )
    _device(decode)
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--chunk-tokens", type=int, default=2048, metavar="N", help="of prompts in a step (default %(default)s)"
    )
    engine.add_argument(
        "--page-size", type=int, metavar="N", help="tokens of a page (default 64 on a GPU, 16 on a CPU)"
    )
    engine.add_argument(
        "--memory-fraction", type=float, default=0.9, metavar="F", help="of the GPU's memory (default %(default)s)"
    )
    engine.add_argument(
        "--context", type=int, metavar="N", help="longest request (default: the next power of two, 256 at least)"
    )
    engine.add_argument("--no-graphs", action="store_true", help="decode without CUDA graphs")
    engine.add_argument("--no-overlap", action="store_true", help="read the tokens of a step before the next one")
    parser.add_argument("--json", dest="json_file", metavar="FILE", help="write the results; '-' is standard output")
    parser.add_argument("--plot", metavar="FILE", help="against batch or rate, a line for each mode (png, svg, pdf)")
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
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help="problems of a set (default %(default)s)")
    parser.add_argument("--sets", default=",".join(SETS), metavar="S,…", help="of problems (default %(default)s)")
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
        metavar="L",
        help=f"records of a ring, {RING_LEN_MIN}…{RING_LEN_MAX} (default {DEFAULT_RING_LEN}; longer for --spec)",
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
    memory.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel shards (default %(default)s)")
    spec = parser.add_argument_group("speculation")
    spec.add_argument("--spec", "--draft-tokens", type=int, metavar="N", help="drafts that a step verifies")
    spec.add_argument("--spec-state", metavar="S,…", help="ring, snapshot, kv-replay, fold, or several (default: all)")
    parser.add_argument("--plot", metavar="FILE", help="bytes of a step against the ring length (png, svg, pdf)")


def _model(parser: argparse.ArgumentParser) -> Any:
    """Model and prompt; returns the group of the prompt's options, of which one may be given."""
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="a shipped name or a folder (default gdn)"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue (default: a sample)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from FILE, '-' is standard input")
    return prompt


def _decode(
    parser: argparse.ArgumentParser, ring_len: int | None = DEFAULT_RING_LEN, said: str = "default %(default)s"
) -> None:
    decode = parser.add_argument_group("decode")
    _ring_len(decode, ring_len, said)
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


def _ring_len(parser: Any, default: int | None = DEFAULT_RING_LEN, said: str = "default %(default)s") -> None:
    parser.add_argument(
        "--ring-len",
        type=int,
        default=default,
        metavar="L",
        help=f"decode steps between two writes of the state, {RING_LEN_MIN}…{RING_LEN_MAX} ({said})",
    )
