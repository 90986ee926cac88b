"""Learning-rate schedule as a pure function of the step: resuming needs no scheduler state."""

import math

from cellmill.config.run import Train


def learning_rate(train: Train, step: int, steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0) out of `steps`: linear warm-up, then the schedule's decay.

    The last step of a cosine or linear schedule has `lr * min_lr_frac`.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step + 1 - train.warmup_steps) / max(1, steps - train.warmup_steps))
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1 - done
    return train.lr * (train.min_lr_frac + (1 - train.min_lr_frac) * left)
