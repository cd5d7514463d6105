"""DFlash, DFlash2 and DSpark draft a whole block in one forward: one network, several layouts of files."""

from eagle_mlx.heads.base import HeadKind
from eagle_mlx.heads.block.formats import DFLASH2_FORMATS, DFLASH_FORMATS, DSPARK_FORMATS, MUSE
from eagle_mlx.heads.block.head import BlockHead, DFlash2Head, DFlashHead, DSparkHead
from eagle_mlx.heads.block.layers import BlockConfig

DFLASH = HeadKind("dflash", "DFlash", DFlashHead, DFLASH_FORMATS)
DFLASH2 = HeadKind("dflash2", "DFlash2", DFlash2Head, DFLASH2_FORMATS)
DSPARK = HeadKind("dspark", "DSpark", DSparkHead, DSPARK_FORMATS)

__all__ = ["MUSE", "BlockConfig", "BlockHead", "DFlash2Head", "DFlashHead", "DSparkHead"]
