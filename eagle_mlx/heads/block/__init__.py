"""DFlash, DFlash2 and DSpark draft a whole block in one forward: one network, several layouts of files."""

from eagle_mlx.heads.block import flat
from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.block.head import BlockHead, DFlash2Head, DFlashHead, DSparkHead
from eagle_mlx.heads.block.speculators import load_speculators_block, save_speculators_block
from eagle_mlx.heads.kinds import Format, HeadKind, of_speculators


def _of_speculators(kind: str, title: str) -> Format:
    return Format(
        name="speculators",
        about=f"{title}, as speculators writes it",
        readers=("speculators", "vLLM"),
        holds=of_speculators(kind),
        load=load_speculators_block,
        save=save_speculators_block,
    )


DFLASH = HeadKind(
    name="dflash",
    title="DFlash",
    head_class=DFlashHead,
    formats=(
        Format(
            name="dflash",
            about="DFlash, as z-lab writes it",
            readers=("z-lab", "vLLM", "SGLang"),
            holds=flat.holds_zlab,
            load=flat.load_zlab,
            save=flat.save_zlab,
        ),
        _of_speculators("dflash", "DFlash"),
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
            readers=("z-lab", "SGLang"),
            holds=flat.holds_zlab_2,
            load=flat.load_zlab,
            save=flat.save_zlab,
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
            readers=("DeepSpec", "vLLM", "SGLang"),
            holds=flat.holds_deepspec,
            load=flat.load_deepspec,
            save=flat.save_deepspec,
        ),
        _of_speculators("dspark", "DSpark"),
        Format(
            name="specforge",
            about="DSpark, as SpecForge writes it",
            readers=("SpecForge", "SGLang"),
            holds=flat.holds_specforge,
            load=flat.load_specforge,
            save=flat.save_specforge,
        ),
    ),
)

__all__ = ["DFLASH", "DFLASH2", "DSPARK", "BlockConfig", "BlockHead", "DFlash2Head", "DFlashHead", "DSparkHead"]
