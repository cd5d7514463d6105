"""DFlash, DFlash2 and DSpark draft a whole block in one forward: one network, several layouts of files."""

from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.block.dspark import (
    holds_deepspec,
    holds_specforge,
    load_deepspec,
    load_specforge,
    save_deepspec,
    save_specforge,
)
from eagle_mlx.heads.block.head import BlockHead, DFlash2Head, DFlashHead, DSparkHead
from eagle_mlx.heads.block.speculators import (
    holds_speculators_dflash,
    holds_speculators_dspark,
    load_speculators_block,
    save_speculators_block,
)
from eagle_mlx.heads.block.zlab import holds_zlab, holds_zlab_2, load_zlab, save_zlab
from eagle_mlx.heads.kinds import Format, HeadKind

DFLASH = HeadKind(
    name="dflash",
    title="DFlash",
    head_class=DFlashHead,
    formats=(
        Format(
            name="dflash",
            about="DFlash, as z-lab writes it",
            read_by="that of z-lab, vLLM and SGLang",
            holds=holds_zlab,
            load=load_zlab,
            save=save_zlab,
            servers=lambda head: ("vllm", "sglang"),
        ),
        Format(
            name="speculators",
            about="DFlash, as speculators writes it",
            read_by="that of speculators and vLLM",
            holds=holds_speculators_dflash,
            load=load_speculators_block,
            save=save_speculators_block,
            servers=lambda head: ("vllm",),
        ),
    ),
)
DFLASH2 = HeadKind(
    name="dflash2",
    title="DFlash2",
    head_class=DFlash2Head,
    formats=(
        Format(
            name="dflash2",
            about="DFlash2, as z-lab writes it",
            read_by="that of z-lab and SGLang",
            holds=holds_zlab_2,
            load=load_zlab,
            save=save_zlab,
            servers=lambda head: ("sglang",),
        ),
    ),
    trainable=False,
)
DSPARK = HeadKind(
    name="dspark",
    title="DSpark",
    head_class=DSparkHead,
    formats=(
        Format(
            name="dspark",
            about="DSpark, as DeepSpec writes it",
            read_by="that of DeepSpec, vLLM and SGLang",
            holds=holds_deepspec,
            load=load_deepspec,
            save=save_deepspec,
            servers=lambda head: ("vllm", "sglang"),
        ),
        Format(
            name="speculators",
            about="DSpark, as speculators writes it",
            read_by="that of speculators and vLLM",
            holds=holds_speculators_dspark,
            load=load_speculators_block,
            save=save_speculators_block,
            servers=lambda head: ("vllm",),
        ),
        Format(
            name="specforge",
            about="DSpark, as SpecForge writes it",
            read_by="that of SpecForge and SGLang",
            holds=holds_specforge,
            load=load_specforge,
            save=save_specforge,
            servers=lambda head: ("sglang",),
        ),
    ),
)

__all__ = ["DFLASH", "DFLASH2", "DSPARK", "BlockConfig", "BlockHead", "DFlash2Head", "DFlashHead", "DSparkHead"]
