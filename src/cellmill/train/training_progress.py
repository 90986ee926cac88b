"""Progress of a training, saved in every checkpoint: steps and cells so far, and which validation was the best."""

from dataclasses import dataclass

from cellmill.config.run import Train

VAL_LOSS = "val_loss"


@dataclass
class Progress:
    """Progress of a run; saved in every checkpoint."""

    step: int = 0
    cells: int = 0
    wall_s: float = 0.0
    train_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    """Validation loss at `best_step`."""
    best_step: int | None = None
    val_step: int | None = None
    skipped_steps: int = 0
    """Steps whose loss or gradient norm was not finite."""
    skipped_in_a_row: int = 0
    """Without steps skipped because the loss scale was too large."""
    loss_scale: float | None = None
    good_steps: int = 0
    """Applied steps since the loss scale last changed."""
    best_value: float | None = None
    """`train.best_metric` at `best_step`; None in checkpoints of before, whose metric was the validation loss."""
    patience_value: float | None = None
    """Value that a validation has to better by more than `train.early_stop_min_delta` to count as an improvement."""
    stale_validations: int = 0
    """Validations since the last improvement."""

    def judge(self, value: float, train: Train) -> bool:
        """Take `train.best_metric` of the validation after this step; return whether it is the best so far.

        A run that resumes gets the same answers: they depend on nothing else.
        """
        sign = 1 if train.best_mode == "min" else -1
        best = self.best_value = self.best_val_loss if self.best_value is None else self.best_value
        if self.patience_value is None or sign * (self.patience_value - value) > train.early_stop_min_delta:
            self.patience_value, self.stale_validations = value, 0
        else:
            self.stale_validations += 1
        if best is not None and sign * value >= sign * best:
            return False
        self.best_value, self.best_val_loss, self.best_step = value, self.val_loss, self.step
        return True

    def patience_is_over(self, train: Train) -> bool:
        """Return whether the run ends here by `train.early_stop_patience`."""
        return train.early_stop_patience is not None and self.stale_validations >= train.early_stop_patience

    def early_end(self, metric: str) -> str:
        """Line about an end by `train.early_stop_patience`."""
        return (
            f"step {self.step}: {metric} has not improved in {self.stale_validations} validations (best "
            f"{self.best_value:.6g} at step {self.best_step}); the training ends here (train.early_stop_patience)"
        )
