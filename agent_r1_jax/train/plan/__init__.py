"""Plans a run from its configuration: plan.make is the entrance for training."""
