"""`eagle-data make`: conversations from no data at all, which the target makes up by itself."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from eagle_mlx.cpu import tune_process
from eagle_mlx.errors import DataError
from eagle_mlx.shards import BITS
from eagle_mlx.target import Target
from eagle_mlx.target_options import options_of

from .capturing import shard_meta
from .jsonl import check_idle, check_new, partial_path
from .options import add_drafting, add_target, aux_layers_of, engine_of, positive, tokenizer_of
from .synthesis.file import Limits, Wanted, make_to_file
from .synthesis.shards import ShardPlace
from .synthesis.tries import MakeConfig, beginning
from .synthesis.user_turns import DOMAINS, FILE, choose_domains, steerable

_SHARES = textwrap.indent(textwrap.fill(", ".join(f"{domain.name}={domain.weight:g}" for domain in DOMAINS), 110), "  ")
HELP = f"""\
Have the target make up conversations: no data set, no licence question, no network.

The target is given its own chat template up to the place where the user speaks, and goes on by itself: it writes the
user's turn (Magpie, Xu et al. 2024, arXiv 2406.08464), then answers it, and may ask again. What a head has to predict
is the target's own answers, and these are.

A target without a chat template writes plain texts instead, from the beginning of a text on, drawn as user turns are.

A system prompt steers what most user turns are about, and some are begun for the target; no answer sees that prompt.
--domains FILE.yaml names domains of yours, with what they begin with ({FILE.name} is an example). The project's own:
{_SHARES}

Tries are left out that came to nothing: user turns that do not end, loop, hold special tokens or are an assistant's;
answers that loop, refuse or are empty; and whatever begins like another. The counts are printed at the end. One
conversation in 25 is on the held-out side by a hash of its prompt: --split train and --split heldout tell them apart.

The same seed gives the same file. What is done lies in FILE.jsonl.partial until FILE.jsonl is whole. Ctrl-C, a SIGTERM
or a crash lose no row that was made: the same command continues with that file by itself. --rows, --tokens, --batch and
--head may differ. To begin anew, delete the .partial file.

--finish, beside the same command, makes no more: FILE.jsonl and the shards get what is done.

--capture keeps the hidden states of the forwards that generate, in shards as `eagle-data collect` makes them, of the
conversations to learn from: nothing is read again. Then --rows and --tokens must stay what they were, too.

examples:
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl
  eagle-data make --target Qwen3-4B --tokens 3000000 --output own.jsonl --domain any=2 --domain code --seed 1
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl --domains what-my-users-ask.yaml
  eagle-train --target Qwen3-4B --data own.jsonl --output out/head
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl --capture out/shards --bits 8
  eagle-train --target Qwen3-4B --shards out/shards --eval-data own.jsonl --output out/head
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command with its flags."""
    part = commands.add_parser("make", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    part.set_defaults(command=run)
    default = MakeConfig()
    add_target(part)
    part.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl[.gz]", help="file to make")
    part.add_argument("--rows", type=positive, default=0, metavar="N", help="conversations to make")
    part.add_argument("--tokens", type=positive, default=0, metavar="N", help="tokens to make, template included")
    part.add_argument("--seed", type=int, default=default.seed, help="of all that is drawn (%(default)s)")
    part.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    part.add_argument("--finish", action="store_true", help="make no more: what an interrupted command did is enough")
    _add_writing(part, default)
    add_drafting(part)
    part.add_argument(
        "--capture", type=Path, metavar="DIR", help="folder of shards to make too: the states of these very forwards"
    )
    part.add_argument("--aux-layers", metavar="A,B,C", help="layers whose output the head reads (1, N/2-1, N-4 of N)")
    part.add_argument("--bits", type=int, choices=BITS, default=16, help="of a value in the shards (%(default)s)")


def _add_writing(part: argparse.ArgumentParser, default: MakeConfig) -> None:
    """What is written, and how it is drawn."""
    part.add_argument(
        "--domains",
        type=Path,
        default=FILE,
        metavar="FILE.yaml",
        help="domains of yours: under each name weight, system, openings (the project's own are %(default)s)",
    )
    part.add_argument(
        "--domain", action="append", default=[], metavar="NAME[=WEIGHT]", help="only these domains; repeatable"
    )
    part.add_argument(
        "--turns",
        type=_shares,
        default=default.turns,
        metavar="A,B,…",
        help="shares of conversations in which the user is to speak once, twice, … "
        f"({','.join(f'{share:g}' for share in default.turns)})",
    )
    part.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=default.temperatures,
        metavar="T",
        help="of the answers; of several each conversation gets one by the seed "
        f"({' '.join(f'{t:g}' for t in default.temperatures)}: heads serve both greedy and sampled text)",
    )
    part.add_argument("--top-p", type=float, default=default.top_p, help="of the answers (%(default)s)")
    part.add_argument(
        "--max-tokens", type=positive, default=default.max_tokens, metavar="N", help="of one answer (%(default)s)"
    )
    part.add_argument(
        "--user-temperature",
        type=float,
        default=default.user_temperature,
        metavar="T",
        help="of user turns (%(default)s)",
    )
    part.add_argument(
        "--user-top-p", type=float, default=default.user_top_p, metavar="P", help="of user turns (%(default)s)"
    )
    part.add_argument(
        "--user-tokens",
        type=positive,
        default=default.user_tokens,
        metavar="N",
        help="by which a user turn must have ended (%(default)s)",
    )
    part.add_argument(
        "--system",
        action="append",
        default=[],
        metavar="TEXT",
        help="system prompt to answer under, '' for the template's own; of several each conversation gets one",
    )


def run(args: argparse.Namespace) -> None:
    """Look at the template first, so that a target that cannot speak as its user shows at once."""
    check_new(args.output, args.overwrite)
    check_idle(args.output)
    limits = _limits(args)
    wanted = Wanted(args.rows, args.tokens)
    config = MakeConfig(
        seed=args.seed,
        domains=choose_domains(args.domain, args.domains),
        turns=args.turns,
        user_temperature=args.user_temperature,
        user_top_p=args.user_top_p,
        user_tokens=args.user_tokens,
        temperatures=tuple(args.temperature),
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        systems=tuple(args.system) or ("",),
    )
    tune_process()
    target = options_of(args).load(args.target)
    _tell_unsteered(target, config)
    place, layers = _place(args, target)
    try:
        engine = engine_of(args, target, layers)
        report = make_to_file(engine, config, wanted, args.output, args.overwrite, True, place, limits=limits)
    except KeyboardInterrupt as e:
        part = partial_path(args.output)
        if not part.exists():
            raise
        raise type(e)(f"what is done is in {part}, and the same command continues with it") from None
    print(f"{args.output}: {report.summary()}")


def _limits(args: argparse.Namespace) -> Limits:
    """What ends the file besides what is wanted. Raises DataError where there is nothing to finish."""
    if not args.finish:
        return Limits()
    if not (begun := partial_path(args.output)).exists():
        raise DataError(f"there is no {begun} to finish; leave --finish out, and the conversations are made")
    return Limits(enough=lambda made, coming: True, first=False)


def _place(args: argparse.Namespace, target: Target) -> tuple[ShardPlace | None, tuple[int, ...]]:
    """Where hidden states go, and the layers that they are the outputs of; nowhere without `--capture`."""
    if args.capture is None:
        return None, ()
    aux_layers = aux_layers_of(args.aux_layers, target)
    place = ShardPlace(args.capture, shard_meta(target, aux_layers, args.bits), args.overwrite)
    return place, (*aux_layers, target.num_layers - 1)


def _tell_unsteered(target: Target, config: MakeConfig) -> None:
    """Say what of the settings is of no effect. Raises TargetError for a target that can make up nothing."""
    tokenizer = tokenizer_of(target)
    if not tokenizer.has_chat_template:
        begin = tokenizer.decode(beginning(tokenizer, target.name))
        print(
            f"the target has no chat template, so it writes texts from their beginning on ({begin!r}): of no effect "
            "are --domain, --turns, --system, --temperature, --top-p and --user-tokens",
            file=sys.stderr,
        )
        return
    usable = {domain.name for domain in steerable(tokenizer, config.domains, target.name)}
    if left := [domain.name for domain in config.domains if domain.name not in usable]:
        print(f"the chat template takes no system prompt, so nothing steers to: {', '.join(left)}", file=sys.stderr)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text}: it must be numbers with commas, such as 0.7,0.2,0.1") from e
