"""Training data: samples, packed into rows, in prefetched batches."""

from .batches import Batches, Piece, Rows, capture_rows, count_learned
from .examples import Examples, InMemory, OnDisk
from .sources import EvalPrompts, TrainData, amount, data_on_disk, heldout_prompts, questions_of, training_data
from .storage import (
    answer_prompts,
    check_data,
    choose_states,
    data_config,
    learned_side,
    make_data,
    of_replay,
    prompt_config,
    public_settings,
    replay_file,
    self_file,
    sources_of,
)
