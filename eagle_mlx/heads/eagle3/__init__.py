"""EAGLE-3: a decoder layer over several of the target's layers, with its own draft vocabulary."""

from eagle_mlx.heads.eagle3.head import Eagle3Config, Eagle3Head, default_aux_layers, random_head, unusual_fields
from eagle_mlx.heads.eagle3.peagle import PEagleConfig, PEagleHead, holds_peagle, load_peagle
from eagle_mlx.heads.eagle3.portable import holds_eagle3, load_eagle3, save_eagle3
from eagle_mlx.heads.eagle3.speculators import holds_speculators, load_speculators, save_speculators
from eagle_mlx.heads.kinds import Format, HeadKind


def _servers(head: Eagle3Head) -> tuple[str, ...]:
    return ("sglang", "vllm") if head.config.num_hidden_layers == 1 else ("vllm",)  # SGLang refuses several layers


KIND = HeadKind(
    name="eagle3",
    title="EAGLE-3",
    head_class=Eagle3Head,
    formats=(
        Format(
            name="eagle3",
            about="portable EAGLE-3, as SafeAILab and SpecForge write it",
            read_by="that of SGLang, vLLM and SpecForge",
            holds=holds_eagle3,
            load=load_eagle3,
            save=save_eagle3,
            servers=_servers,
        ),
        Format(
            name="speculators",
            about="speculators",
            read_by="that of speculators and vLLM",
            holds=holds_speculators,
            load=load_speculators,
            save=save_speculators,
            servers=lambda head: ("vllm",),
            has_embedding=True,
        ),
    ),
    unusual=lambda head: unusual_fields(head.config),
)

PEAGLE = HeadKind(
    name="peagle",
    title="P-EAGLE",
    head_class=PEagleHead,
    formats=(
        Format(
            name="speculators",
            about="P-EAGLE, as speculators writes it",
            read_by="that of speculators and vLLM",
            holds=holds_peagle,
            load=load_peagle,
            save=save_speculators,
            servers=lambda head: ("vllm",),
            has_embedding=True,
        ),
    ),
    trainable=False,
)

__all__ = [
    "KIND",
    "PEAGLE",
    "Eagle3Config",
    "Eagle3Head",
    "PEagleConfig",
    "PEagleHead",
    "default_aux_layers",
    "load_eagle3",
    "load_speculators",
    "random_head",
    "save_eagle3",
    "save_speculators",
]
