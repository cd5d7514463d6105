"""eagle-chat, and accepted draft tokens in color, there and in eagle-generate."""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.errors import PromptError
from eagle_mlx.request import encode
from eagle_mlx.serve.decoding_options import renderer
from eagle_mlx.serve.generate import main as generate
from eagle_mlx.serve.terminal_chat import ChatOptions, ChatSampling, TerminalChat
from eagle_mlx.serve.terminal_chat import main as chat
from tests.fakes import Oracle, tiny_target, tiny_target_folder
from tests.vision_targets import picture, vision_folder

DRAFTS = ("--spec-decode", "ngram", "--spec-policy", "fixed", "--num-draft-tokens", "3", "--max-tokens", "24")
GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)
STATUS = re.compile(r"τ (\d+\.\d\d), [\d.]+ tokens/s, (\d+) of (\d+) tokens drafted")


class Terminal(io.StringIO):
    """Standard input or output at a terminal; `heard` is called with each text that is written."""

    heard: Callable[[str], None] = staticmethod(lambda text: None)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.heard(text)
        return super().write(text)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_target_folder(tmp_path_factory.mktemp("chat") / "target"))


@pytest.fixture(scope="module")
def engine(target: str) -> em.Engine:
    return em.Engine(em.load_target(target), em.NgramProposer(), policy=em.FixedPolicy(3))


def answers(engine: em.Engine, *lines: str, system: str | None = None) -> list[em.Output]:
    """Return the answers that a chat should give to these lines."""
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    outputs = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        outputs += engine.generate([messages], em.SamplingParams(max_tokens=24))
        messages.append({"role": "assistant", "content": outputs[-1].text})
    return outputs


@pytest.fixture
def talk(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run eagle-chat with standard input; return its exit status and what it prints on both streams."""

    def run(typed: io.StringIO | str, *args: str, out: Terminal | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed) if isinstance(typed, str) else typed)
        if out is not None:
            monkeypatch.setattr("sys.stdout", out)
        code = chat([*args, "--target", target, *DRAFTS])
        printed, noted = capsys.readouterr()
        return code, printed if out is None else out.getvalue(), noted

    return run


def test_draft_tokens_are_green_and_the_text_is_unchanged() -> None:
    talker = tiny_target(tokenizer=True)
    prompt = encode(talker, "def f(x):")
    [whole] = em.Engine(talker).generate([prompt], em.SamplingParams(max_tokens=30))
    decoder = em.Engine(talker, Oracle({tuple(prompt): whole.tokens}, 0.1), policy=em.FixedPolicy(3))
    chunks = list(decoder.stream(prompt, em.SamplingParams(max_tokens=30)))
    assert "".join(map(renderer(talker.tokenizer, (), color=False), chunks)) == whole.text
    colored = "".join(map(renderer(talker.tokenizer, (), color=True), chunks))
    assert GREEN.sub(r"\1", colored) == whole.text
    marks = [mark for chunk in chunks for mark in chunk.from_draft]
    assert talker.tokenizer is not None
    ends = [len(talker.tokenizer.decode(whole.tokens[: at + 1])) for at in range(len(marks))]
    drafted = [whole.text[start:end] for start, end, mark in zip([0, *ends], ends, marks, strict=False) if mark]
    assert sum(marks) == chunks[-1].output.accepted > 0  # type: ignore[union-attr]
    assert "".join(GREEN.findall(colored)) == "".join(drafted)


@pytest.mark.parametrize(
    ("terminal", "environment", "color"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False), (False, {}, False)],
)
def test_generate_colors_only_for_terminals_that_want_it(
    target: str,
    engine: em.Engine,
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    environment: dict[str, str],
    color: bool,
) -> None:
    for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    assert generate(["def f(x):", "--target", target, "--color", "--quiet", *DRAFTS]) == 0
    assert GREEN.sub(r"\1", out.getvalue()) == answers(engine, "def f(x):")[0].text + "\n"
    assert bool(GREEN.search(out.getvalue())) == color


def test_lines_of_a_pipe_are_turns_of_one_conversation(
    talk: Callable[..., tuple[int, str, str]], engine: em.Engine
) -> None:
    code, out, err = talk("import os\n\nand sys?\n/stats", "--system", "Be brief.")
    expected = answers(engine, "import os", "and sys?", system="Be brief.")
    assert (code, out) == (0, "".join(output.text + "\n" for output in expected))
    *turns, total = STATUS.findall(err)
    # A plain round may be dispatched before the text that would match is known, which depends on what was read before.
    tokens = [len(output.tokens) for output in expected]
    assert [int(count) for _, _, count in turns] == tokens
    assert all(
        float(tau) == pytest.approx(n / (n - int(kept)), abs=0.1)
        for (tau, kept, _), n in zip(turns, tokens, strict=True)
    )
    assert total[1:] == tuple(str(sum(int(line[at]) for line in turns)) for at in (1, 2))
    assert "2 answers" in err
    assert re.search(r"the conversation has \d+ of 512 tokens", err)


def test_commands_change_the_conversation(talk: Callable[..., tuple[int, str, str]], engine: em.Engine) -> None:
    lines = ["import os", "/clear", "/system Be brief.", "/system", "/what", "/usr/bin?", "/exit", "never read"]
    code, out, err = talk("\n".join(lines), "--quiet")
    [first], [second] = answers(engine, "import os"), answers(engine, "/usr/bin?", system="Be brief.")
    assert (code, out) == (0, f"{first.text}\n{second.text}\n")
    assert err.count("system prompt: Be brief.") == 2
    assert "unknown command /what" in err
    assert "tokens/s" not in err.replace("per second", "")


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(
    talk: Callable[..., tuple[int, str, str]], engine: em.Engine
) -> None:
    class Typed(Terminal):
        """A line, Ctrl-C at the next one, another line, and Ctrl-D."""

        lines = iter(["import os\n", None, "and sys?\n", ""])

        def readline(self, *_: Any) -> str:  # type: ignore[override]
            if (line := next(self.lines)) is None:
                raise KeyboardInterrupt
            return line

    out, whole = Terminal(), answers(engine, "import os")[0].text
    out.heard = lambda text: os.kill(os.getpid(), signal.SIGINT) if text.strip() and text != "> " else None
    code, printed, err = talk(Typed(), "--no-color", out=out)
    first, second = (text.removesuffix("\n") for text in printed.split("> ")[1::1] if text.strip())
    assert code == 0
    assert 0 < len(first) < len(whole)
    assert whole.startswith(first)
    assert second
    assert "Ctrl-D or /exit ends the chat" in err
    assert len(STATUS.findall(err)) + err.count("too short") == 2


def test_ctrl_c_before_an_answer_keeps_the_chat(
    talk: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing a question takes time, too: encoding it, and compiling a grammar that limits the thought."""
    prepare = ChatOptions.params_for
    monkeypatch.setattr(
        ChatOptions, "params_for", lambda *given: (os.kill(os.getpid(), signal.SIGINT), prepare(*given))[1]
    )
    code, _, err = talk("import os\n/clear\n")
    assert code == 0
    assert "the conversation is empty" in err


def test_a_turn_that_does_not_fit_is_forgotten(talk: Callable[..., tuple[int, str, str]], engine: em.Engine) -> None:
    code, out, err = talk("import os\n" + "x " * 600 + "\nand sys?\n", "--quiet")
    assert (code, out) == (0, "".join(output.text + "\n" for output in answers(engine, "import os", "and sys?")))
    assert "does not fit the target's context" in err
    assert "/clear forgets the conversation" in err


def test_pasted_lines_are_one_question() -> None:
    if "libedit" in (pytest.importorskip("readline").__doc__ or ""):
        pytest.skip("libedit does not tell pasted text from typed text")
    code = "from eagle_mlx.serve import terminal_chat as chat; chat.edit_lines(); print([chat.read_line()])"
    keyboard, terminal = pty.openpty()
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    shown = b""
    with subprocess.Popen([sys.executable, "-c", code], **streams, env={**os.environ, "TERM": "xterm"}) as process:
        while b"> " not in shown:
            shown += os.read(keyboard, 4096)
        text = b"def f():\n    return 1\n"
        marks_pasted_text = b"\x1b[?2004h" in shown
        os.write(keyboard, b"\x1b[200~" + text + b"\x1b[201~\r" if marks_pasted_text else text)
        while b"]\r\n" not in shown:
            shown += os.read(keyboard, 4096)
        assert process.wait() == 0
    os.close(keyboard)
    os.close(terminal)
    assert repr([text.decode()]).encode() in shown


def test_the_next_question_reuses_the_prompt_of_a_hybrid_that_thought() -> None:
    """Its state cannot be cut, and templates leave out earlier thoughts, so only what comes before them is reused."""
    talker = tiny_target(tokenizer=True, architecture="qwen3_5")
    assert talker.tokenizer is not None
    talker.tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: <think>' }}{% endif %}"
    )
    engine = em.Engine(talker, prefix_cache_bytes=1 << 26)
    terminal = TerminalChat(engine, ChatOptions(quiet=True, sampling=ChatSampling(max_tokens=8)))
    terminal.answer("def f(x): return x " * 12)
    [question, answer] = terminal.messages
    next_prompt = [question, answer, {"role": "user", "content": "and g?"}]
    reused = engine.generate(next_prompt, em.SamplingParams(max_tokens=1)).cached_tokens
    assert reused >= len(encode(talker, f"user: {question['content']}")) - 1


def test_a_system_prompt_that_the_template_refuses_changes_nothing(
    talk: Callable[..., tuple[int, str, str]], target: str, engine: em.Engine
) -> None:
    template = Path(target, "chat_template.jinja")
    before = template.read_text()
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + before
    )
    code, out, err = talk("import os\n/system Be brief.\n/system\n/stats\nand sys?")
    template.write_text(before)
    assert (code, out) == (0, "".join(output.text + "\n" for output in answers(engine, "import os", "and sys?")))
    assert "refuses these messages: no system role" in err
    assert "system prompt: none" in err
    assert re.search(r"the conversation has \d+ of 512 tokens", err)


def test_a_template_that_refuses_messages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    talker = tiny_target(tokenizer=True)
    assert talker.tokenizer is not None
    talker.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(PromptError, match=r"tiny refuses these messages: no system role"):
        encode(talker, [{"role": "system", "content": "x"}])


def test_models_without_a_chat_template_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    (folder / "chat_template.jinja").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("x"))
    assert chat(["--target", str(folder), "--spec-decode", "none"]) == 2
    assert "has no chat template; use eagle-generate" in capsys.readouterr().err


def test_an_image_goes_with_the_next_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlx_vlm")
    target = str(vision_folder(tmp_path / "target", "mistral3"))
    (tmp_path / "a.png").write_bytes(picture(1, 48, 64))
    lines = [f"/image {tmp_path / 'a.png'}", f"/image {tmp_path / 'b.png'}", "def f(x):", "and g?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert chat(["--target", target, *DRAFTS]) == 0
    out, err = capsys.readouterr()
    assert "1 image with the next question" in err
    assert "b.png cannot be read" in err
    shown = [{"type": "image", "image": picture(1, 48, 64)}, {"type": "text", "text": "def f(x):"}]
    params = em.SamplingParams(max_tokens=24)
    engine, messages = em.Engine(em.load_target(target)), list[Any]()
    for content in (shown, "and g?"):
        messages.append({"role": "user", "content": content})
        output = engine.generate(messages, params)
        assert output.text in out
        messages.append({"role": "assistant", "content": output.text})


def test_an_image_that_is_dragged_into_the_terminal_is_found(
    talk: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Terminals write its path as for a shell: with backslashes before spaces, or in quotes."""
    path = tmp_path / "a shot at 7.png"
    path.write_bytes(picture(1, 48, 64))
    ways = [str(path), str(path).replace(" ", "\\ "), shlex.quote(str(path)), f'"{path}"']
    err = talk("".join(f"/image {way}\n" for way in ways))[2]
    assert err.count("reads only text") == len(ways)  # the model's refusal: each file was read
    for name in ("it's.png", "~no-such-user/a.png"):
        code, _, err = talk(f"/image {name}\n/clear\n")
        assert (code, f"{name} cannot be read" in err, "the conversation is empty" in err) == (0, True, True)


def test_an_image_is_refused_by_a_model_that_reads_only_text(
    talk: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(picture(1, 48, 64))
    assert "reads only text" in talk(f"/image {tmp_path / 'a.png'}\n")[2]
