"""Every kind of head learns, gives the same result for any number of streams, and drafts the same when saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from eagle_mlx.data_pipelines import ShardCapture, capture
from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import load_head
from eagle_mlx.heads.mtp import MTPHead
from eagle_mlx.hidden_states import from_16_bits, widened
from eagle_mlx.shards import ShardReader
from eagle_mlx.target import Target
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data.batches import Batches, Rows, capture_rows
from eagle_mlx.train.data.examples import InMemory
from eagle_mlx.train.evaluation import Evaluator
from eagle_mlx.train.kinds import KINDS, Head, kind_of, resolve
from eagle_mlx.train.kinds.base import layer_shape
from eagle_mlx.train.step.inputs import add_noise, make_plan, noise_of
from eagle_mlx.train.step.losses import Objective, feature_losses
from eagle_mlx.train.step.step import Stepper, objective_of, part_arrays, part_loss
from tests.architectures import tiny_model
from tests.eagle_mlx.heads import ALL, eagle3
from tests.eagle_mlx.heads import KINDS as RANDOM
from tests.fakes import tiny_target
from tests.full import in_full, in_turn
from tests.train.test_step import conversations

NEW = ("eagle", "mtp")
SMALL: dict[str, Any] = {"target": "tiny", "rows": 4, "length": 32, "lr": 3e-3, "lanes": 1}


def config_of(name: str, **more: Any) -> TrainConfig:
    return resolve(TrainConfig.of(**{**SMALL, "head": name, **more}), 32)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def new(target: Target, config: TrainConfig) -> Head:
    kind = KINDS[config.head.kind]
    head: Head = kind.new(target, config, None, kind.aux_layers(target, config))
    return head


def batch(target: Target, head: Head, count: int = 12) -> Rows:
    samples = InMemory(list(capture(target, head.named_layers, conversations(target, count))))
    return next(Batches(samples, count, SMALL["length"], 0).epoch(0))


def trained(target: Target, config: TrainConfig, steps: int, rows: Rows | None = None) -> tuple[Head, list[Any]]:
    head = new(target, config)
    stepper, rows = Stepper(head, target, config), rows or batch(target, head)
    return head, [stepper(rows, 1.0) for _ in range(steps)]


LEARNT_FROM = [
    ("eagle", {"loss_weights": [0.1, 1.0]}),
    ("eagle", {"loss_weights": [0.1, 1.0], "unroll": 2}),
    ("mtp", {}),
    ("mtp", {"loss": "hard"}),
    ("eagle3", {"loss": "lk"}),
    ("peagle", {"unroll": 4}),
    ("dflash2", {"unroll": 3}),
]


@pytest.mark.parametrize(("name", "more"), in_turn(LEARNT_FROM))
def test_the_loss_falls_and_the_target_is_unchanged(target: Target, name: str, more: dict[str, Any]) -> None:
    before = {key: np.array(value) for key, value in weights_of(target.model).items()}
    config = config_of(name, lr=1e-2, **more)
    _, results = trained(target, config, 40)
    assert np.all(np.isfinite([result.loss for result in results]))
    assert results[-1].loss < results[0].loss - 0.25  # the rest is the target's own entropy
    assert min(results[-1].accuracy_by_step) > 0.5 > max(results[0].accuracy_by_step)
    assert len(results[-1].accuracy_by_step) == config.optimization.unroll
    for key, value in weights_of(target.model).items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("name", [*RANDOM, "dflash2"])
def test_the_gradient_of_any_head_is_finite_and_points_downhill(name: str) -> None:
    target = tiny_target(vocab=64)
    head: Any = ALL[name](target)
    head.attach(target)
    rows = batch(target, head, 4)
    config = config_of(kind_of(head).name, unroll=3)
    arrays = part_arrays(head, target, rows, make_plan(rows, 3), np.full(3, 1 / 50, np.float32))
    objective = objective_of(config)

    def loss() -> mx.array:
        return part_loss(head, target, arrays, objective)[0]

    before, gradient = nn.value_and_grad(head, loss)()
    flat: dict[str, mx.array] = dict(tree_flatten(gradient))
    assert flat.keys() == dict(tree_flatten(head.trainable_parameters())).keys()
    assert all(np.all(np.isfinite(np.array(g))) for g in flat.values())
    norm = float(sum(np.square(np.array(g, np.float64)).sum() for g in flat.values()))
    head.load_weights([(key, weights_of(head)[key] - 2e-3 / norm * g) for key, g in flat.items()], strict=False)
    assert float(np.array(loss())) == pytest.approx(float(np.array(before)) - 2e-3, abs=1e-3)


@pytest.mark.parametrize("name", in_turn([*NEW, "dflash2", "peagle"], 1, 1))
def test_streams_change_only_rounding(target: Target, name: str) -> None:
    noise = {"feature_noise": 0.3}
    head, results = trained(target, config_of(name, **noise), 3)
    other, others = trained(target, config_of(name, lanes=2, **noise), 3)
    np.testing.assert_allclose([r.loss for r in results], [r.loss for r in others], rtol=1e-4)
    weights = weights_of(other)
    for key, value in weights_of(head).items():
        np.testing.assert_allclose(value, weights[key], atol=3e-4, err_msg=key)


@pytest.mark.parametrize("name", [*NEW, "dflash2", "peagle"])
def test_the_same_seed_gives_the_same_weights(target: Target, name: str) -> None:
    heads = [trained(target, config_of(name, seed=seed, feature_noise=0.2), 2)[0] for seed in (5, 5, 6)]
    first, again, other = ({k: np.array(v) for k, v in weights_of(head).items()} for head in heads)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert any(not np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", in_full(list(KINDS), ["mtp"]))
def test_a_saved_head_drafts_the_same(target: Target, tmp_path: Path, name: str) -> None:
    """Weights in bfloat16 are precise enough for nearly all greedy drafts of a trained head."""
    head, _ = trained(target, config_of(name, lr=1e-2), 30)
    kind_of(head).save(head, tmp_path / "head", "tiny", {"step": 30})
    loaded = load_head(tmp_path / "head", target)
    assert type(loaded) is type(head)
    prompts = [tokens[:6] for tokens, _ in conversations(target)]
    evaluator = Evaluator(target, prompts, depth=3, max_tokens=14)
    now, then = evaluator.measure(loaded), evaluator.measure(head)
    assert now.acceptance_length == pytest.approx(then.acceptance_length, rel=0.05)
    assert now.acceptance_length > 1.3


@pytest.mark.parametrize("name", NEW)
def test_only_the_last_layer_is_captured(target: Target, name: str) -> None:
    head = new(target, config_of(name))
    rows = batch(target, head)
    assert rows.states is not None
    assert rows.states.shape[-1] == target.hidden_size
    anew = np.array(capture_rows(target, (), rows))
    np.testing.assert_allclose(anew[rows.segments > 0], widened(rows.states)[rows.segments > 0], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("name", in_turn(NEW, 1))
def test_states_with_aux_layers_serve_as_well(target: Target, name: str) -> None:
    config = config_of(name)
    samples = InMemory(list(capture(target, (0, 2), conversations(target))))
    wide = next(Batches(samples, 12, SMALL["length"], 0).epoch(0))
    _, with_aux = trained(target, config, 2, wide)
    _, without = trained(target, config, 2)
    assert [r.loss for r in with_aux] == pytest.approx([r.loss for r in without], rel=1e-5)


def test_the_feature_distance_is_smooth_and_weighted() -> None:
    outputs = [mx.array([[[0.0, 0.5], [3.0, 0.0]]])]
    wanted = mx.array([[0.0, 0.0], [0.0, 0.0]])
    loss = feature_losses(outputs, wanted, mx.array([[1, 0]]), mx.array([[2.0, 10.0]]))
    assert loss.item() == pytest.approx(2 * (3 - 0.5) / 2 + 10 * (0.5 * 0.25) / 2)


def test_the_loss_of_eagle_is_the_sum_of_its_parts(target: Target) -> None:
    head: Any = RANDOM["eagle"](target)
    head.attach(target)
    rows = batch(target, head)
    arrays = part_arrays(head, target, rows, make_plan(rows, 2), np.full(2, 1 / 100, np.float32))
    token = part_loss(head, target, arrays)
    both = part_loss(head, target, arrays, Objective("soft", 0.1, feature_weight=2.0))
    assert len(token) == 3
    assert both[0].item() == pytest.approx(0.1 * token[0].item() + 2.0 * mx.sum(both[3]).item(), rel=1e-5)
    np.testing.assert_allclose(both[1], 0.1 * token[1] + 2.0 * both[3], rtol=1e-5)
    _, results = trained(target, config_of("eagle", unroll=2), 1)
    assert len(results[0].feature_loss_by_step) == 2


def test_noise_is_bounded_falls_with_length_and_changes_step_by_step() -> None:
    segments = np.zeros((2, 1100), np.int32)
    segments[0, :1024], segments[1, :100], segments[1, 100:150] = 1, 1, 2
    rows = Rows(np.zeros_like(segments), np.ones_like(segments, np.uint8), segments, None)
    noise = noise_of(rows, 0.1, 0, 0)
    assert noise["noise"][0, 0] == pytest.approx(0.05)
    assert noise["noise"][1, [0, 120]] == pytest.approx([0.1, 0.1])
    added = np.abs(add_noise({name: mx.array(x) for name, x in noise.items()}, mx.zeros((2, 1100, 2))))
    for row, end, size in ((0, 1024, 0.05), (1, 150, 0.1)):
        assert added[row, :end].max() == pytest.approx(size, rel=0.05)
    other = noise_of(rows, 0.1, 0, 1)
    assert not np.array_equal(noise["keys"], other["keys"])
    second = noise_of(Rows(rows.tokens[1:], rows.loss_mask[1:], segments[1:], None, first=1), 0.1, 0, 0)
    assert np.array_equal(second["keys"], noise["keys"][1:]), "a row has its own noise, whichever rows it comes with"
    assert noise_of(rows, 0.0, 0, 0) == {}


@pytest.mark.parametrize("name", NEW)
def test_a_new_head_begins_with_a_layer_that_adds_nothing(target: Target, name: str) -> None:
    head: Any = new(target, config_of(name))
    layer = head.block if name == "mtp" else head.layers[0]
    x = mx.array(np.random.default_rng(0).normal(size=(1, 6, 32)), mx.float32)
    np.testing.assert_array_equal(layer(x, "causal", None), x)
    if name == "mtp":
        np.testing.assert_allclose(head.norm.weight, target.model.model.norm.weight, rtol=1e-5)


@pytest.mark.parametrize("sharing", [1, 2])
def test_a_new_eagle3_head_sees_the_newest_token_first(target: Target, sharing: int) -> None:
    """It has no other source for the newest token: over 30 positions, each gives itself the most attention."""
    head: Any = new(target, config_of("eagle3", heads=4, kv_heads=4 // sharing))
    tokens = mx.array(np.random.default_rng(0).permutation(target.vocab_size)[None, :30])
    g = mx.array(np.random.default_rng(1).normal(size=(1, 30, 32)), mx.float32)
    attention = head.midlayer.self_attn
    queries, keys, _ = attention.project(head.midlayer.inputs(target.embed(tokens), g)[0])
    keys = mx.repeat(keys, sharing, axis=1)
    scores = attention.scale * queries @ keys.swapaxes(-1, -2)
    own = np.array(mx.diagonal(mx.softmax(scores, axis=-1), axis1=-2, axis2=-1))
    assert np.median(own) > 0.8


MTP_OF = ["qwen3", "mimo", "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5", "llama", "qwen2", "qwen3_moe"]


@pytest.mark.parametrize("model_type", MTP_OF)
def test_mtp_heads_for_every_architecture_that_is_known(tmp_path: Path, model_type: str) -> None:
    target = Target(tiny_model(model_type), name=model_type)
    head, results = trained(target, config_of("mtp"), 2)
    assert isinstance(head, MTPHead)
    assert head.config.model_type == model_type
    assert np.all(np.isfinite([result.loss for result in results]))
    kind_of(head).save(head, tmp_path / "head", model_type, {})
    loaded = load_head(tmp_path / "head", target)
    assert isinstance(loaded, MTPHead)
    assert loaded.config.layer == head.config.layer


def test_an_architecture_without_mtp_is_refused_by_name() -> None:
    target = Target(tiny_model("phi3"), name="a phi")
    with pytest.raises(
        ConfigError, match=r"a phi: .*model_type phi3 are not supported, only those of .*qwen3.*--head eagle3"
    ):
        KINDS["mtp"].check(target, config_of("mtp"))


@pytest.mark.parametrize("name", in_full(list(KINDS), ["eagle3", "mtp", "dflash2"]))
def test_a_quantized_target(name: str) -> None:
    target = tiny_target(hidden=64)
    nn.quantize(target.model, 32, 4)
    target = Target(target.model, name="4-bit")
    head, results = trained(target, config_of(name, lr=1e-2), in_full(12, 6))
    assert results[-1].loss < results[0].loss
    assert all(value.dtype == mx.float32 for value in weights_of(head).values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"head": "mtp", "draft_vocab": 512},
            "--draft-vocab cannot be used with --head mtp: .*leave --draft-vocab out",
        ),
        ({"head": "mtp", "heads": 2}, "--heads cannot be used with --head mtp"),
        ({"head": "dflash2", "draft_vocab": 512}, "--head dflash2: it drafts the target's whole vocabulary"),
        (
            {"head": "eagle", "aux_layers": [1]},
            "--aux-layers cannot be used with --head eagle: it reads only the target's last layer",
        ),
        ({"loss_weights": [1, 1]}, "--loss-weights cannot be used with --head eagle3"),
    ],
)
def test_settings_of_another_kind_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(TrainConfig.of(**values), 32)


def test_defaults_depend_on_the_kind() -> None:
    usual = resolve(TrainConfig(), 32)
    assert (usual.optimization.unroll, usual.head.draft_vocab) == (7, 32000)
    mtp = config_of("mtp")
    weights = [mtp.optimization.decay**j for j in range(mtp.optimization.unroll)]
    assert [round(weight / sum(weights), 2) for weight in weights] == [0.51, 0.31, 0.18]
    assert config_of("eagle").optimization.loss_weights == (1.0, 0.1)
    assert config_of("eagle", feature_noise=0).optimization.feature_noise == 0.0
    assert resolve(TrainConfig.of(**mtp.flat()), 64) == mtp, "a resumed run keeps its settings"
    by_hand = config_of("mtp", step_weights=[0.5, 0.5])
    assert (by_hand.optimization.unroll, by_hand.optimization.decay) == (2, None)
    assert resolve(TrainConfig.of(**by_hand.flat()), 64) == by_hand
    assert by_hand.changed(seed=1).optimization.step_weights == (0.5, 0.5)


def test_the_learning_rate_follows_the_targets_width_unless_it_is_given(target: Target) -> None:
    open_, given = TrainConfig.of(target="tiny"), TrainConfig.of(target="tiny", lr=3e-3)
    assert resolve(open_, target.hidden_size).optimization.lr == pytest.approx(1e-4 * 4096 / target.hidden_size)
    assert resolve(given, target.hidden_size).optimization.lr == 3e-3
    for written in ({"lr": 0}, {"lr": "0.0"}, {"lr": None}, {}):
        assert TrainConfig.of(**written).optimization.lr is None, "all mean: not given"


def test_the_default_learning_rate_depends_on_the_target(target: Target) -> None:
    own = 1e-4 * 4096 / target.hidden_size
    heads = [trained(target, config_of("eagle", lr=rate), 3)[0] for rate in (0.0, own, own / 2)]
    weights = [np.array(head.layers[0].self_attn.q_proj.weight) for head in heads]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert np.abs(weights[0] - weights[2]).max() > 0


@pytest.mark.parametrize("on_disk", [True, False])
def test_features_in_training_are_those_of_decoding_for_a_target_with_a_huge_channel(
    tmp_path: Path, on_disk: bool
) -> None:
    """The residual stream of Gemma 3 has channels far beyond float16's range, by which `fc_norm` divides the others."""
    target, huge = tiny_target(), mx.arange(32) == 5
    embedding = target.model.model.embed_tokens
    embedding.weight = mx.where(huge, 8e5, embedding.weight)
    head = eagle3(target, fc_norm=True)
    for norm in head.fc_norm:
        norm.weight = mx.where(huge, 0.0, norm.weight)
    head.attach(target)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    if on_disk:
        ShardCapture(target, head.aux_layers, [(tokens, [1] * 8)]).write(tmp_path / "s")
    [sample] = ShardReader(tmp_path / "s") if on_disk else capture(target, head.aux_layers, [(tokens, [1] * 8)])
    assert sample.states is not None
    decoded = head.features(target.forward(mx.array([tokens]), aux_layers=head.aux_layers).aux)
    trained = kind_of(head).features(head, target, from_16_bits(sample.states.whole)[None], lambda x: x)
    np.testing.assert_allclose(trained, decoded, rtol=0.02, atol=0.01 * float(mx.max(mx.abs(decoded))))


def test_a_new_head_takes_the_largest_of_its_targets_values_for_each_layer_and_the_whole_context() -> None:
    target = Target(tiny_model("step3p5", rope_theta=[1000.0, 4000.0, 1000.0, 2000.0]))
    target.context_length = 262_144
    shape = layer_shape(target, TrainConfig.of(target="tiny"))
    assert shape["rope_theta"] == 4000.0
    assert shape["max_position_embeddings"] == 262_144
