"""Data for training draft heads. The command `eagle-data` is in `cli`; training uses only the names below."""

from typing import TYPE_CHECKING

from eagle_mlx.late import late_names

if TYPE_CHECKING:
    from .capturing import ShardCapture, capture, shard_meta
    from .conversation import Conversation, Message, held_out_prompts
    from .options import FIRST_ROWS, MakeConfig
    from .rendering import Sample, prompt_tokens, render_all
    from .sources import hub_data_set, public_source
    from .sources.reading import DataConfig, FilterOptions, ReadReport, Split, check_conversations, read_conversations
    from .sources.rows import place_of
    from .synthesis import steerable
    from .synthesis.file import Enough, MakeLimits, Wanted, make_to_file, once, prompt_keys
    from .synthesis.loop import growing_engine, text_settings
    from .synthesis.regeneration import RegenerateConfig, regenerate_to_file

__getattr__ = late_names(__name__, __file__)
