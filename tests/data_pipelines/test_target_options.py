"""eagle-data with targets loaded as in mlx-lm: adapters, another template, more end tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_mlx.data_pipelines import cli
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.shards import ShardReader
from eagle_mlx.target import load_target
from tests.data_pipelines.rows import ROWS
from tests.data_pipelines.templates import render
from tests.fakes import interrupt_after, talking_target_folder, tiny_adapters

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}{% if short %} Be short.{% endif %}"
)
TAGGED = (
    "{% if short %}Be short. {% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(talking_target_folder(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_adapters(tmp_path_factory.mktemp("lora") / "mine"))


def test_shards_tell_which_adapters_the_target_had(
    target: str, adapters: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    argv = [
        "collect",
        "--target",
        target,
        "--data",
        chats,
        "--split",
        "all",
        "--max-length",
        "64",
        "--output",
        str(folder),
    ]
    assert cli.main([*argv, "--adapter-path", adapters]) == 0
    adapter = load_target(target, adapter_path=adapters).adapter
    assert adapter is not None
    assert ShardReader(folder).meta.adapter == adapter.digest
    assert cli.main([*argv, "--adapter-path", adapters, "--resume"]) == 0
    capsys.readouterr()
    assert cli.main([*argv, "--resume"]) == 2
    assert "(target: " in capsys.readouterr().err
    assert cli.main(["inspect", str(folder)]) == 0
    assert f"adapter      {adapter.digest}" in capsys.readouterr().out


def test_answers_are_continued_with_the_same_target_alone(
    target: str, adapters: str, chats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object
) -> None:
    out = tmp_path / "a.jsonl"
    argv = ["regenerate", "--target", target, "--data", chats, "--split", "all", "--output", str(out)]
    argv += ["--max-tokens", "8", "--chat-template", TEMPLATE]
    with monkeypatch.context() as patch:
        interrupt_after(2, KeyboardInterrupt, patch)
        assert cli.main([*argv, "--adapter-path", adapters]) == 130
    assert isinstance(capsys, pytest.CaptureFixture)
    for more, reason in (
        ([], "was started with target "),
        (["--adapter-path", adapters, "--extra-eos-token", "7"], "was started with other target_eos_tokens"),
        (["--adapter-path", adapters, "--chat-template-args", '{"short": true}'], "with target_template_args {}, not"),
    ):
        capsys.readouterr()
        assert cli.main([*argv, *more]) == 2
        assert reason in capsys.readouterr().err
    assert cli.main([*argv, "--adapter-path", adapters]) == 0
    plain = tmp_path / "plain.jsonl"
    argv[argv.index("--output") + 1] = str(plain)
    assert cli.main(argv) == 0
    assert plain.read_bytes() != out.read_bytes()


def test_made_conversations_are_those_of_the_adapters(target: str, adapters: str, tmp_path: Path) -> None:
    argv = ["make", "--target", target, "--rows", "2", "--max-tokens", "8", "--user-tokens", "30", "--turns", "1"]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, more in zip(files, (["--adapter-path", adapters], []), strict=True):
        assert cli.main([*argv, "--output", str(path), *more]) == 0
    assert files[0].read_bytes() != files[1].read_bytes()


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED])
def test_what_a_template_takes_is_rendered(
    template: str, target: str, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for more in ([], ["--chat-template-args", '{"short": true}']):
        assert cli.main(["inspect", chats, "--target", target, "--chat-template", template, *more]) == 0
        shown.append(capsys.readouterr().out)
    assert ["Be short." in text for text in shown] == [False, True]
    model = load_target(target, chat_template=template, chat_template_args={"short": True})
    assert model.tokenizer is not None
    rendered = render(model.tokenizer, parse_row(ROWS[0], "x"))
    learned = [token for token, learn in zip(rendered.tokens, rendered.loss_mask, strict=True) if learn]
    assert "it is 0" in model.tokenizer.decode(learned)
    assert "say" not in model.tokenizer.decode(learned)
