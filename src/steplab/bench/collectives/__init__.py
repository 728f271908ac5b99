"""How long collectives take between ranks of this machine.

`job.py` is the plain data that both sides share, `sweep.py` plans, records and makes the table,
`group.py` starts the ranks and follows them: none of these imports torch. `launch.py` and `rank.py`
run in processes of their own.
"""
