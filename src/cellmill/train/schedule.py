"""Learning-rate schedule as a pure function of the step: resuming needs no scheduler state."""

import math

from cellmill.config.run import Train


def learning_rate(train: Train, step: int, steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0) out of `steps`: linear warm-up, then the schedule's decay.

    The last step of a schedule that decays has `lr * min_lr_frac`. A wsd schedule (warm-up, stable, decay; Hu et al.
    2024, MiniCPM) decays linearly over the last `decay_frac` of the steps, and never before the end of the warm-up.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    decayed = steps - train.warmup_steps
    if train.schedule == "wsd":
        decayed = min(decayed, math.ceil(train.decay_frac * steps))
    done = min(1.0, max(0.0, (step + 1 - steps + decayed) / max(1, decayed)))
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1 - done
    return train.lr * (train.min_lr_frac + (1 - train.min_lr_frac) * left)
