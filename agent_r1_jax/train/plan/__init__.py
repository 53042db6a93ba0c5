"""Plans a run from its configuration; training calls plan.make.

Scripts that only play a policy call sizes.resolve, setup.load and setup.make_engine.
"""
