"""Images in all APIs: a model that sees reads them, and nothing that a client sends as one breaks the server."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any

import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.serve.api.chat import render_chat
from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.vision import tower
from eagle_mlx.vision.images import ImageLimits, decode
from tests.serve.api.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from tests.serve.api.live import DEPTH, Live, live, wide
from tests.serve.api.test_histories import DIALECTS, called, post, prompt_tokens, text, user
from tests.vision_targets import data_url, picture, vision_folder

pytest.importorskip("mlx_vlm")
A, B = picture(1, 48, 64), picture(2, 64, 40)
LIMITS = ImageLimits(images=3, mb=0.1, megapixels=0.1, tokens=50, formats="png,jpeg,gif")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = vision_folder(tmp_path_factory.mktemp("vision") / "mistral3", "mistral3")

    def loaded() -> Loaded:
        target = em.load_target(folder)
        engine = em.Engine(target, em.NgramProposer(), policy=em.FixedPolicy(DEPTH), prefix_cache_bytes=1 << 24)
        return Loaded(engine, "ngram", DEPTH, image_limits=LIMITS)

    with live(loaded) as running:
        yield running


def shown(dialect: Dialect, image: bytes | str) -> dict[str, Any]:
    """Return the part of an image in the API's form."""
    url = image if isinstance(image, str) else data_url(image)
    if dialect is CHAT:
        return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    if dialect is RESPONSES:
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if url.startswith("data:"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    return {"type": "image", "source": {"type": "url", "url": url}}


def ask(dialect: Dialect, *images: bytes | str) -> dict[str, Any]:
    return user(*(shown(dialect, image) for image in images), text(dialect, "what is this?"))


def message_of(answer: Any) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def answer_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" in body:
        return str(body["choices"][0]["message"]["content"])
    parts = body["content"] if "content" in body else body["output"][0]["content"]
    return str(parts[0]["text"])


def test_all_apis_count_the_expanded_tokens_and_give_the_same_text(seeing: Live) -> None:
    plain = [prompt_tokens(post(seeing, dialect, [ask(dialect)])) for dialect in (CHAT, MESSAGES, RESPONSES)]
    answers = [post(seeing, dialect, [ask(dialect, A)]) for dialect in (CHAT, MESSAGES, RESPONSES)]
    counts = [prompt_tokens(answer) for answer in answers]
    assert counts == [count + 16 for count in plain]
    assert len({*counts}) == len({*map(answer_of, answers)}) == 1
    other = [post(seeing, dialect, [ask(dialect, B)]) for dialect in (CHAT, MESSAGES, RESPONSES)]
    assert [answer_of(answer) for answer in other] != [answer_of(answer) for answer in answers]
    turns = {"messages": [ask(MESSAGES, A)]}
    assert seeing.http.post("/v1/messages/count_tokens", json=turns).json() == {"input_tokens": counts[1]}
    assert seeing.http.post("/tokenize", json={"messages": [ask(CHAT, A)]}).json()["count"] == counts[0]


@DIALECTS
def test_results_of_tools_may_have_images(seeing: Live, dialect: Dialect) -> None:
    question = user(text(dialect, "look"))

    def tokens(*parts: dict[str, Any]) -> int:
        result = [text(dialect, "a picture:"), *parts]
        return prompt_tokens(post(seeing, dialect, [question, *called(dialect, "{}", result)]))

    assert tokens(shown(dialect, A)) == tokens() + 16


def test_a_stored_response_keeps_its_images(seeing: Live) -> None:
    first = post(seeing, RESPONSES, [ask(RESPONSES, A)])
    later = post(seeing, RESPONSES, [user(text(RESPONSES, "and now?"))], previous_response_id=first.json()["id"])
    message = {"role": "assistant", "content": [{"type": "output_text", "text": answer_of(first)}]}
    whole = post(seeing, RESPONSES, [ask(RESPONSES, A), message, user(text(RESPONSES, "and now?"))])
    assert prompt_tokens(later) == prompt_tokens(whole)
    assert answer_of(later) == answer_of(whole)


def test_a_session_reads_each_screenshot_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = vision_folder(tmp_path / "qwen3_5", "qwen3_5")  # whose recurrent states cannot be cut
    decoded = list[bytes]()
    monkeypatch.setattr(tower, "decode", lambda data, limits: decoded.append(data) or decode(data, limits))

    def loaded() -> Loaded:
        return Loaded(em.Engine(em.load_target(folder), prefix_cache_bytes=1 << 26), "none", 0)

    shots = [picture(seed, 48, 64) for seed in range(5)]
    turns: list[dict[str, Any]] = [user(text(MESSAGES, "Find the button. " * 8))]
    with live(loaded) as running:
        before = 0
        for count, shot in enumerate(shots, 1):
            turns += called(MESSAGES, "{}", [shown(MESSAGES, shot), text(MESSAGES, "a screenshot " * 6)])
            usage = post(running, MESSAGES, turns, max_tokens=2).json()["usage"]
            assert usage["cache_read_input_tokens"] >= before - 16, "all but the newest turn is in the prefix cache"
            assert decoded == shots[:count], "each image is decoded once, by the request that brings it"
            before = usage["cache_read_input_tokens"] + usage["input_tokens"]
        again = post(running, MESSAGES, turns, max_tokens=2).json()["usage"]
        assert again["cache_read_input_tokens"] > 0
        assert decoded == shots


def test_the_same_question_about_two_images_is_two_conversations_to_learn_from(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "mistral3", "mistral3")
    config = LoadConfig.of(target=str(folder), learn=tmp_path / "learned", spec_decode="ngram", kv_gb=0.01, prior=False)
    with live(lambda: load(config, lambda _: None)) as running:
        loaded = running.service.loaded
        assert loaded is not None
        learner = loaded.learner
        assert learner is not None
        for count, dialect in enumerate((CHAT, MESSAGES, RESPONSES), 1):
            later = [{"role": "assistant", "content": "a wall"}, user(text(dialect, "and now?"))]
            for turns in ([ask(dialect, A)], [ask(dialect, B)], [ask(dialect, A), *later]):
                assert post(running, dialect, turns, max_tokens=8).status_code == 200
            running.until(lambda expected=3 * count: len(learner.texts.all) == expected)  # after the answer
            keys = [text.key for text in learner.texts.all][-3:]
            assert keys[0] == keys[2] != keys[1]


def test_the_prefix_cache_of_a_server_distinguishes_images(seeing: Live) -> None:
    def cached(image: bytes) -> int:
        words = "What do you see here? " * 12
        turns = [user(text(CHAT, words), shown(CHAT, image), text(CHAT, words))]
        return int(post(seeing, CHAT, turns).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    counts = [cached(picture(11)), cached(picture(11)), cached(picture(12))]
    assert counts[0] == 0
    assert counts[1] > counts[2] + 24, "the same image hits, another only up to the image"


def file_of(form: str, **more: Any) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, form, **more)
    return file.getvalue()


def bomb() -> bytes:
    """Return a PNG of a few bytes that says that it has 9,000 x 9,000 pixels."""
    header = struct.pack(">IIBBBBB", 9_000, 9_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    parts = (struct.pack(">I", len(x)) + k + x + struct.pack(">I", zlib.crc32(k + x)) for k, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def animated() -> bytes:
    from PIL import Image

    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    file = BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


HOSTILE = {
    "an http URL": ("https://example.org/a.png", "does not fetch https URLs"),
    "a file URL": ("file:///etc/passwd", "does not fetch file URLs"),
    "a path": ("/etc/passwd", "anything but data: URLs"),
    "nothing": ("", "anything but data: URLs"),
    "text": ("data:text/plain,hello", "base64"),
    "bad base64": ("data:image/png;base64,@@@@", "not valid base64"),
    "a broken file": (b"\x89PNG broken", "cannot be decoded"),
    "a truncated file": (picture(3, 64, 64, "JPEG")[:-200], "cannot be decoded"),
    "another format": (file_of("BMP"), "cannot be decoded"),
    "a format that is not allowed": (file_of("WEBP"), "cannot be decoded"),
    "a bomb": (bomb(), "million pixels"),
    "a large image": (picture(4, 400, 400), "0.2 million pixels; the limit is 0.1"),
    "a large file": (b"\0" * 200_000, "MB; the limit is 0.1 MB"),
    "an animation": (animated(), "animated"),
}


@DIALECTS
@pytest.mark.parametrize("name", HOSTILE)
def test_an_image_that_cannot_be_read_is_refused(seeing: Live, dialect: Dialect, name: str) -> None:
    image, reason = HOSTILE[name]
    place = "input[0].content[0]: " if dialect is RESPONSES else "messages[0].content[0]: "
    message = message_of(post(seeing, dialect, [ask(dialect, image)]))
    assert message.startswith(place)
    assert reason in message
    assert "/etc" not in message
    assert " at 0x" not in message


@DIALECTS
def test_an_image_that_cannot_be_read_does_not_end_a_session(seeing: Live, dialect: Dialect) -> None:
    answered = {"role": "assistant", "content": "I cannot see it."}
    turns = [ask(dialect, b"broken"), answered, user(text(dialect, "go on"))]
    kind = shown(dialect, b"")["type"]
    note = user(text(dialect, f"[{kind} left out: it cannot be read]what is this?"))
    assert prompt_tokens(post(seeing, dialect, turns)) == prompt_tokens(post(seeing, dialect, [note, *turns[1:]]))


@DIALECTS
@pytest.mark.parametrize("name", ["a broken file", "a large image", "an http URL"])
def test_an_image_of_a_result_that_cannot_be_read_does_not_end_a_session(
    seeing: Live, dialect: Dialect, name: str
) -> None:
    def tokens(words: str, *parts: dict[str, Any]) -> int:
        turns = [user(text(dialect, "look")), *called(dialect, "{}", [text(dialect, words), *parts])]
        return prompt_tokens(post(seeing, dialect, turns))

    picture = shown(dialect, HOSTILE[name][0])
    note = f"[{picture['type']} left out: it cannot be read]"
    assert tokens("a picture:", picture) == tokens(f"a picture:{note}")


@DIALECTS
def test_a_server_that_cannot_read_its_vision_weights_says_so_in_its_log(
    tmp_path: Path, dialect: Dialect, caplog: pytest.LogCaptureFixture
) -> None:
    folder = vision_folder(tmp_path / "mistral3", "mistral3")
    with live(lambda: Loaded(em.Engine(em.load_target(folder)), "none", 0)) as running:
        question = [ask(dialect)]
        answer_of(post(running, dialect, question))
        (folder / "model.safetensors").unlink()
        later = [ask(dialect, A), {"role": "assistant", "content": "I see."}, user(text(dialect, "go on"))]
        for turns in ([ask(dialect, A)], later):
            answer = post(running, dialect, turns)
            assert answer.status_code == 500, answer.text
            assert "see the server's log" in answer.text
            assert str(folder) not in answer.text
            assert str(folder / "model.safetensors") in caplog.text
            caplog.clear()
        answer_of(post(running, dialect, question))


def test_a_vision_tower_that_fails_in_the_engine_names_its_folder_only_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = vision_folder(tmp_path / "mistral3", "mistral3")

    def fail(path: Path, **_: object) -> None:
        raise ValueError(f"{path}/model.safetensors lacks 3 parameters")

    monkeypatch.setattr("mlx_vlm.utils.load_model", fail)
    with live(lambda: Loaded(em.Engine(em.load_target(folder)), "none", 0)) as running:
        answer = post(running, CHAT, [ask(CHAT, A)])
        assert answer.status_code == 500
        assert "the engine failed: TargetError" in answer.text
        assert str(folder) not in answer.text
        assert f"{folder}/model.safetensors lacks 3 parameters" in caplog.text


def test_a_model_without_vision_weights_does_not_name_its_folder(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "mistral3", "mistral3")
    weights = mx.load(str(folder / "model.safetensors"))
    text = {name: value for name, value in weights.items() if "vision" not in name and "projector" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), text, metadata={"format": "mlx"})
    with live(lambda: Loaded(em.Engine(em.load_target(folder)), "none", 0)) as running:
        message = message_of(post(running, CHAT, [user(shown(CHAT, A))]))
        assert "no weights of a vision tower" in message
        assert str(folder) not in message


def test_the_time_limit_of_a_request_holds_while_images_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = vision_folder(tmp_path / "mistral3", "mistral3")
    over, decoded, ended = Event(), list[bytes](), Event()

    def slow(data: bytes, limits: ImageLimits) -> Any:
        decoded.append(data)
        assert over.wait(20)
        return decode(data, limits)

    def render(*args: Any) -> Any:
        try:
            return render_chat(*args)
        finally:
            ended.set()

    monkeypatch.setattr(tower, "decode", slow)
    monkeypatch.setattr("eagle_mlx.serve.api.chat.render_chat", render)
    with live(lambda: Loaded(em.Engine(em.load_target(folder)), "none", 0), wide(Limits(request_seconds=0.3))) as it:
        answer = post(it, CHAT, [ask(CHAT, A, B)])
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        over.set()
        assert ended.wait(20)
        assert decoded == [A], "the rest is not prepared for nobody"


def test_too_many_images_or_tokens_are_refused(seeing: Live) -> None:
    assert "send at most 3" in message_of(post(seeing, CHAT, [ask(CHAT, A, A, A, A)]))
    assert "the limit is 50" in message_of(post(seeing, CHAT, [ask(CHAT, picture(5), picture(6), picture(7))]))


def test_placeholders_in_texts_mean_no_image(seeing: Live) -> None:
    assert seeing.service.loaded is not None
    encode = seeing.service.loaded.engine.target.tokenizer.encode
    words = [len(encode(f"see{middle}here", add_special_tokens=False)) for middle in (" [\u2060IMG] ", " ")]
    plain, fake = (post(seeing, CHAT, [user(shown(CHAT, A), text(CHAT, x))]) for x in ("see here", "see [IMG] here"))
    assert prompt_tokens(fake) - prompt_tokens(plain) == words[0] - words[1]
    spoofed = [user(shown(CHAT, A), text(CHAT, "\U0001fffe0\U0001ffff"))]
    assert "does not write each image once" in message_of(post(seeing, CHAT, spoofed))


def test_images_beyond_the_context_are_refused(seeing: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeing.service.loaded is not None
    context = 512
    monkeypatch.setattr(seeing.service.loaded.target, "context_length", context)
    turns = [user(shown(CHAT, A), text(CHAT, "word " * (context - 15)))]
    assert "maximum context length" in message_of(post(seeing, CHAT, turns))
