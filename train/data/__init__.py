"""Training data: samples, packed into rows, in prefetched batches."""

from .batches import Batches, Piece, Rows, count_learned
from .examples import Examples, InMemory, Joined, OnDisk
from .sources import (
    EvalPrompts,
    TrainData,
    amount,
    capture_rows,
    check_warmup,
    data_on_disk,
    heldout_prompts,
    questions_of,
    reading_share,
    tokens_to_read,
    training_data,
    warmup_data,
    with_warmup_tokens,
)
from .storage import check_data, choose_states, make_data, public_settings, self_file, sources_of
