"""The slot table's tests: a Redis, a model of what it must hold, and drivers that act on both.

`store` is the Redis with its scripts, `row` and `model` are the model, `ledger` what must be true
whatever the model says. `world` does to both what `schedule` chooses by seed and
`test_slot_machine` by Hypothesis. `steps` are single ones for the plain tests.
"""
