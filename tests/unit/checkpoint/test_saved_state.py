"""Which checkpoint is the best, by the losses in states."""

from titanlite.checkpoint.saved_state import best_of, state_from_json


def test_losses_are_ranked_with_those_on_the_same_samples() -> None:
    """A state of an earlier titanlite, which does not say on what it was measured, is ranked with its neighbours."""
    old = state_from_json({"version": 3, "step": 2, "losses": {"validation_loss": 1.0}})
    ranked = {2: old.measured("validation_loss"), 3: old.measured("validation_loss_ema")}
    assert best_of(ranked) == 2
    for step, loss, since, best in ((4, 2.0, 0, 2), (6, 3.0, 5, 6), (8, 2.5, 5, 8), (9, 2.5, 5, 8)):
        new = {"losses": {"validation_loss": loss}, "measured_since": {"validation_loss": since}}
        ranked[step] = state_from_json(new).measured("validation_loss")
        assert best_of(ranked) == best
