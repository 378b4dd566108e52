"""`slotstream bench`: a load on a deployment of one's own, and what came of it.

`plan.py` says what is asked for, `samples.py` what is pushed, `load.py` pushes and listens,
`ledger.py` keeps the accounts, `outcome.py` and `display.py` show them.
"""
