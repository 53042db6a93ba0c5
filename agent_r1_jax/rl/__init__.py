"""Learning: what a rollout's rewards are worth, and the updates of the models.

An algorithm is plain functions, as in optax (algorithms.py): estimators of advantages and
transforms of rewards (advantages.py), the KL to the reference (kl.py), losses with their
aggregations and corrections (losses.py). The tokens of a rollout are a table (table.py).
It is scored by the models (scoring.py), gets advantages (credit.py) and becomes packed
micro-batches (minibatch.py), from which learner.py makes gradients and optimizer steps.
updates.py does all that for one rollout.
"""
