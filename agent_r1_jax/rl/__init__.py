"""Learning: credit assignment for a rollout, and updates of the models.

An algorithm is plain functions, as in optax (algorithms.py): advantage estimators and
reward transforms (advantages.py), the KL to the reference (kl.py), losses with their
aggregations and corrections (losses.py). The tokens of a rollout form a table (table.py).
The models score it (scoring.py), credit.py adds advantages, and minibatch.py packs it
into micro-batches, from which learner.py computes gradients and optimizer steps.
updates.py does all this for one rollout.
"""
