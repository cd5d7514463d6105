"""Make the texts that benchmarks/agents.py replays: prompts that repeat in kind, with a model's own answers.

    python benchmarks/make_workloads.py --target out/real/smollm2-135m-instruct --head checkpoints/smollm2-135m-instruct
    python benchmarks/make_workloads.py --only sql --rows 500 --output sql.jsonl     (prompts alone, for eagle-train)

The model answers extraction jobs, requests for JSON of one schema (with a grammar), questions to one database and
questions about passages. The first jobs are answered again at temperature 0.7. Independent questions are those of
`checkpoints/smollm2-135m-instruct/conversations.jsonl.gz`. Edits and sessions come from the history of this repository:
a file before a commit, and the same file after it; a session reads files by tool calls and changes them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import eagle_mlx as em
from eagle_mlx.serve.chat.structured import Grammars

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "benchmarks" / "workloads.jsonl.gz"
MOST_CHARACTERS = 6000
"""Characters of a file that is edited; the real model's context has 8,192 tokens."""
PEOPLE = [
    "Maria Keller",
    "Jonas Weber",
    "Aisha Khan",
    "Tom Baker",
    "Lucia Rossi",
    "Kenji Sato",
    "Olga Petrova",
    "Samuel Osei",
]
FIRMS = ["Nordwind Logistics", "Blue River Foods", "Atlas Tools", "Sunrise Bakery", "Delta Optics", "Harbor Paints"]
GOODS = ["apples", "steel pipes", "printer paper", "glass bottles", "winter coats", "coffee beans", "bicycle chains"]
CITIES = ["Hamburg", "Lyon", "Osaka", "Porto", "Denver", "Nairobi", "Cracow", "Toronto"]
MONTHS = ["January", "March", "April", "June", "August", "October", "December"]
EXTRACT = """You read messages of a warehouse and extract the order. Answer with exactly these six lines:
Name: the person who orders
Company: the company
Goods: what is ordered
Amount: the number of units
City: where to deliver
Date: when to deliver

Message: {text}"""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "company": {"type": "string", "maxLength": 40},
        "order": {
            "type": "object",
            "properties": {
                "goods": {"type": "string", "maxLength": 30},
                "amount": {"type": "integer"},
                "unit_price": {"type": "number"},
            },
            "required": ["goods", "amount", "unit_price"],
            "additionalProperties": False,
        },
        "delivery_city": {"type": "string", "maxLength": 30},
        "delivery_date": {"type": "string", "maxLength": 20},
        "is_urgent": {"type": "boolean"},
    },
    "required": ["name", "company", "order", "delivery_city", "delivery_date", "is_urgent"],
    "additionalProperties": False,
}
TABLES = """The database has these tables:
customers(id, name, city, age)
orders(id, customer_id, product, amount, price, order_date)
products(id, name, category, stock)

Write one SQL query, and nothing else. {question}"""
QUESTIONS = (
    "List the names of all customers in {city} who are older than {number}.",
    "How many orders of {goods} were there after {month}?",
    "What is the average price of {goods} by city?",
    "Which products have fewer than {number} units in stock?",
    "List the {number} customers who spent the most on {goods}.",
    "How many customers are there in {city} and in {other}?",
)
PASSAGE = (
    "{firm} was founded in {city} by {name} in {year}. It began with {number} workers who sold {goods}. In its tenth "
    "year, a fire destroyed the main building, and the company moved to {other}. Today it has {more} workers, sells "
    "{goods} and {extra} in twelve countries, and is led by {second}, who joined as an apprentice."
)
ABOUT = (
    "Who founded the company, and where?",
    "Why did the company move?",
    "What does the company sell today?",
    "Summarize the text in two sentences.",
    "Who leads the company today, and how did this person begin?",
)
READ = {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
WRITE = {
    "name": "write_file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
}


def details(rng: Random) -> dict[str, Any]:
    (name, second), (firm, _), (goods, extra), (city, other) = (
        rng.sample(words, 2) for words in (PEOPLE, FIRMS, GOODS, CITIES)
    )
    numbers = {"number": rng.randint(5, 90), "more": rng.randint(100, 900), "year": rng.randint(1890, 1990)}
    date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
    words = {"name": name, "second": second, "firm": firm, "goods": goods, "extra": extra, "city": city, "other": other}
    return {**words, **numbers, "date": date, "month": date.split()[1]}


def message(rng: Random) -> str:
    forms = (
        "Hi, this is {name} from {firm}. We need {number} units of {goods} in {city} by {date}.",
        "{firm} would like {number} units of {goods}, please. Deliver them to {city} on {date}. Yours, {name}",
        "Please send {goods} ({number} units) to our site in {city} until {date}. Thanks! {name}, {firm}",
    )
    return rng.choice(forms).format(**details(rng))


def sql(rng: Random, form: str) -> str:
    return TABLES.format(question=form.format(**details(rng)))


ONLY: dict[str, Callable[[Random], str]] = {
    "extraction": lambda rng: EXTRACT.format(text=message(rng)),
    "sql": lambda rng: sql(rng, rng.choice(QUESTIONS)),
    "translation": lambda rng: f"Translate this message to French.\n\n{message(rng)}",
}
"""Kinds of prompts of which there can be any number."""


def write_prompts(kind: str, rows: int, output: Path) -> None:
    """Write different prompts of one kind as conversations of one user's message."""
    rng = Random(f"only {kind}")
    prompts: dict[str, None] = {}
    while len(prompts) < rows:
        prompts[ONLY[kind](rng)] = None
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts)
    output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def questions(rng: Random) -> Iterator[tuple[str, str]]:
    """Yield kinds and prompts that the model answers."""
    for _ in range(120):
        yield "extraction", EXTRACT.format(text=message(rng))
    for _ in range(60):
        yield "json", f"Return the order in this message as JSON.\n\n{message(rng)}"
    for number in range(60):
        yield "sql", sql(rng, QUESTIONS[number % len(QUESTIONS)])
    for _ in range(8):
        text = PASSAGE.format(**details(rng))
        for question in ABOUT:
            yield "passages", f"{text}\n\n{question}"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def edits(count: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield the subjects of commits, a changed Python file's path, and its text before and after; the oldest first."""
    commits = git("log", "--format=%H %s", "--diff-filter=M", "--no-merges", "-n", str(20 * count)).splitlines()
    rows: list[tuple[str, str, str, str]] = []
    for line in commits[:: len(commits) // (2 * count) or 1]:
        commit, subject = line.split(" ", 1)
        names = git("diff-tree", "--no-commit-id", "--name-only", "-r", "--diff-filter=M", commit).split()
        path = next((name for name in names if name.endswith(".py")), None)
        if path is not None and len(rows) < count:
            before, after = git("show", f"{commit}~1:{path}"), git("show", f"{commit}:{path}")
            if max(len(before), len(after)) <= MOST_CHARACTERS:
                rows.append((subject, path, before, after))
    yield from reversed(rows)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sessions(rows: Sequence[tuple[str, str, str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the turns of coding sessions that change files by tool calls, three files a session."""
    system = (
        f"You change code with tools. Call one as <tool_call>JSON</tool_call>.\n{json.dumps([READ, WRITE], indent=1)}"
    )
    for start in range(0, len(rows), 3):
        history = system
        for subject, path, before, after in rows[start : start + 3]:
            turns = (
                (f"\n\nUser: {subject}", call("read_file", path=path)),
                (f"\n\nTool: {before}", call("write_file", path=path, content=after)),
                ("\n\nTool: ok", f"Done: {subject}."),
            )
            for request, answer in turns:
                history += request
                if len(history) <= 4 * MOST_CHARACTERS:
                    yield {"kind": "sessions", "prompt": f"{history}\n\nAssistant: ", "answer": answer}
                history += f"\n\nAssistant: {answer}"


def independent(count: int) -> Iterator[dict[str, Any]]:
    with gzip.open(ROOT / "checkpoints/smollm2-135m-instruct/conversations.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file]
    for question, answer in Random(0).sample([row[:2] for row in rows], count):
        yield {"kind": "independent", "prompt": question["content"], "answer": answer["content"]}


def answers(engine: em.Engine, prompts: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    grammar = Grammars.of(engine.target).grammar(
        {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    )
    again = [(kind, prompt, 0.7) for kind, prompt in prompts if kind == "extraction"][:40]
    jobs = [(kind, prompt, 0.0) for kind, prompt in prompts] + [("retried", prompt, t) for _, prompt, t in again]
    params = [
        em.SamplingParams(
            max_tokens=160, temperature=temperature, seed=number, grammar=grammar if kind == "json" else None
        )
        for number, (kind, _, temperature) in enumerate(jobs)
    ]
    chats = [[{"role": "user", "content": prompt}] for _, prompt, _ in jobs]
    for (kind, prompt, _), output in zip(jobs, engine.generate(chats, params, progress=True), strict=True):
        yield {"kind": kind, "prompt": prompt, "answer": output.text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--head")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--only", choices=ONLY, help="write prompts of this kind, without answers; needs --output")
    parser.add_argument("--rows", type=int, default=500, help="with --only: number of prompts (default: 500)")
    arguments = parser.parse_args()
    if arguments.only is not None:
        if arguments.output == OUTPUT:
            parser.error("--only needs --output FILE")
        write_prompts(arguments.only, arguments.rows, arguments.output)
        return
    if arguments.target is None or arguments.head is None:
        parser.error("give --target and --head, or --only")
    target = em.load_target(arguments.target)
    head = em.HybridProposer(em.HeadProposer(em.load_head(arguments.head, target)))
    changed = list(edits(36))
    rows = [
        *independent(120),
        *answers(em.Engine(target, head), list(questions(Random(0)))),
        *({"kind": "edits", "prompt": f"Edit {p}.\n\n{a}", "answer": b} for _, p, a, b in changed),
        *sessions(changed),
    ]
    with gzip.open(arguments.output, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} texts in {arguments.output}")


if __name__ == "__main__":
    main()
